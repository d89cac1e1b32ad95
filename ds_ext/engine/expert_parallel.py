"""Which experts a rank has under DeepSpeed's expert parallelism, and which ranks have the same.

``deepspeed.moe`` gives each expert parameters of its own, numbered anew on each rank; AutoEP stacks
those of a rank in one. Both mark them. All experts have one numbering here, so that what is saved
of them does not depend on how many ranks they are spread over.
"""

from collections.abc import Mapping
from typing import cast

from deepspeed.checkpoint.constants import (
    AUTOEP_PARAM_LOCAL_EXPERTS,
    AUTOEP_PARAM_LOGICAL_SHAPE,
    DS_AUTOEP_UC_META,
)
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist

from ds_ext.distributed.placement import Group
from ds_ext.engine.parameters import deepspeed_parameter


def is_expert(param: Tensor) -> bool:
    """Whether a parameter is of experts that only some ranks may have."""
    return getattr(param, "allreduce", True) is False


def refuse_spread_experts(model: nn.Module) -> None:
    """Raises ValueError for a model of which only an engine knows which rank has which expert."""
    if any(map(is_expert, model.parameters())):
        raise ValueError(
            "fuse_into_backward: the model has experts that DeepSpeed spreads over ranks. Only its "
            "engine knows which rank has which: use deepspeed.initialize."
        )


def group(param: Tensor) -> Group:
    """The ranks that have the same experts as this one."""
    name = deepspeed_parameter(param).group_name
    return cast(Group, groups._get_expert_data_parallel_group(name))


def names(found: Mapping[Tensor, str], module: nn.Module) -> dict[Tensor, str]:
    """Names of parameters in which experts of ``deepspeed.moe`` have their number among all."""
    made = dict(found)
    for path, layer in module.named_modules():
        if isinstance(layer, MoE):
            first = layer.num_local_experts * groups._get_expert_parallel_rank(
                layer.expert_group_name
            )
            experts = layer.deepspeed_moe.experts.deepspeed_experts
            prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts.".lstrip(".")
            for i, expert in enumerate(experts):
                made |= {p: f"{prefix}{first + i}.{n}" for n, p in expert.named_parameters()}
    return made


def exchanges() -> set[dist.ProcessGroup]:
    """The groups whose ranks send each other tokens."""
    return set(groups._get_expert_parallel_group_dict().values())


def place(param: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Of a stack that AutoEP has divided: its first expert among all, and the shape of all."""
    told = getattr(param, DS_AUTOEP_UC_META, None)
    if told is None:
        return None
    own = list(told[AUTOEP_PARAM_LOCAL_EXPERTS])
    assert own == list(range(own[0], own[0] + len(own))), "experts that do not follow each other"
    return own[0], tuple(told[AUTOEP_PARAM_LOGICAL_SHAPE])
