"""Which experts a rank has under DeepSpeed's expert parallelism, and which ranks have the same.

``deepspeed.moe`` gives each expert parameters of its own, numbered anew on each rank; AutoEP stacks
those of a rank in one. Both mark them. All experts have one numbering here, so that what is saved
of them does not depend on how many ranks they are spread over.
"""

from collections.abc import Mapping
from typing import cast

from deepspeed.checkpoint import constants
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist

from ds_ext.distributed.placement import Group
from ds_ext.engine.parameters import deepspeed_parameter

# Where AutoEP notes what it has divided; a DeepSpeed before 0.19.8 notes nothing.
_AUTOEP = getattr(constants, "DS_AUTOEP_UC_META", "")


def is_expert(param: Tensor) -> bool:
    """Returns whether a parameter is of experts that only some ranks may have."""
    return getattr(param, "allreduce", True) is False


def refuse_spread_experts(model: nn.Module) -> None:
    """Checks that every rank has the same experts, as ``fuse_into_backward`` takes for granted.

    Raises:
        ValueError: for experts that are spread, of which only an engine knows which rank has which.
    """
    if any(map(is_expert, model.parameters())):
        raise ValueError(
            "fuse_into_backward: the model has experts that DeepSpeed spreads over ranks. Only its "
            "engine knows which rank has which: use deepspeed.initialize."
        )


def group(param: Tensor) -> Group:
    """Returns the ranks that have the same experts as this one."""
    name = deepspeed_parameter(param).group_name
    return cast(Group, groups._get_expert_data_parallel_group(name))


def gradient_factor(param: Tensor, tensor_size: int) -> int:
    """Returns how many times the gradient of its losses the gradient of an expert is.

    Ranks of tensor parallelism have the same tokens, of which each sends experts a part; then they
    gather what the experts give. The gradient of that, which is the same on all of them, AutoEP
    adds up over them in backward; deepspeed.moe takes it from one.

    Args:
        param: of an expert.
        tensor_size: ranks of tensor parallelism.
    """
    return 1 if place(param) is None else tensor_size


def names(found: Mapping[Tensor, str], module: nn.Module) -> dict[Tensor, str]:
    """Returns names of parameters that are the same on whichever rank an expert is.

    Args:
        found: the names of parameters on this rank, where ``deepspeed.moe`` counts its experts.
        module: the model.
    """
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
    """Returns the groups whose ranks send each other tokens."""
    return set(groups._get_expert_parallel_group_dict().values())


def place(param: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Returns where a stack of experts that AutoEP has divided lies in the whole stack.

    Returns:
        The number of its first expert, and the shape [experts, ...] of all; None for another
        parameter.
    """
    told = getattr(param, _AUTOEP, None)
    if told is None:
        return None
    own = list(told[constants.AUTOEP_PARAM_LOCAL_EXPERTS])
    assert own == list(range(own[0], own[0] + len(own))), "experts that do not follow each other"
    return own[0], tuple(told[constants.AUTOEP_PARAM_LOGICAL_SHAPE])
