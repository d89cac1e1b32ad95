"""Expert parallelism of DeepSpeed: the experts of each rank, and the ranks that share them.

``deepspeed.moe`` gives each expert its own parameters, and numbers experts from 0 on each rank.
AutoEP stacks the experts of a rank in one parameter. Both mark these parameters. This module
numbers experts over the whole model, so that checkpoints do not depend on the number of ranks.
"""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_ext.distributed.groups import with_attribute


def is_expert(param: Tensor) -> bool:
    """Returns whether a parameter belongs to experts that DeepSpeed may spread over ranks."""
    return getattr(param, "allreduce", True) is False


def global_names(found: Mapping[Tensor, str], module: nn.Module) -> dict[Tensor, str]:
    """Returns parameter names that number each expert within the whole model.

    In DeepSpeed's names, ``found``, ``deepspeed.moe`` numbers the experts of this rank.
    """
    made = dict(found)
    for path, layer in module.named_modules():
        if isinstance(layer, MoE):
            rank = groups._get_expert_parallel_rank(layer.expert_group_name)
            first = layer.num_local_experts * rank
            experts = layer.deepspeed_moe.experts.deepspeed_experts
            prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts.".lstrip(".")
            for i, expert in enumerate(experts):
                made |= {p: f"{prefix}{first + i}.{n}" for n, p in expert.named_parameters()}
    return made


def stack_position(param: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Returns the position of this rank's part in a stack of experts that AutoEP has split.

    That is the number of its first expert, and the shape [experts, ...] of the whole stack; None
    for other parameters.
    """
    described = getattr(param, constants.DS_AUTOEP_UC_META, None)
    if described is None:
        return None
    own = list(described[constants.AUTOEP_PARAM_LOCAL_EXPERTS])
    assert own == list(range(own[0], own[0] + len(own))), "experts that do not follow each other"
    return own[0], tuple(described[constants.AUTOEP_PARAM_LOGICAL_SHAPE])


# Router outputs under AutoEP.

_REGISTRY = "_CAN_RECORD_REGISTRY"


class _Registry(dict[str, Any]):
    """A copy of the registry that accepts both models and names of classes."""

    def get(self, key: Any, default: Any = None) -> Any:
        if isinstance(key, str):
            return super().get(key, default)
        return super().get(str(type(key))) or {}


def readable_by_name() -> contextlib.AbstractContextManager[None]:
    """Context in which AutoEP can look up transformers' recorded outputs by class name.

    Since transformers 5.23 their registry accepts only models as keys. DeepSpeed 0.19.8 passes the
    name of a class, which raises TypeError. The registry itself does not change: AutoEP removes its
    entries again after it has installed the model's hooks.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(module, _REGISTRY, None)
    if registry is None:
        return contextlib.nullcontext()
    return with_attribute(module, _REGISTRY, _Registry(registry))
