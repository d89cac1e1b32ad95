"""What DeepSpeed's tensor parallelism (AutoTP) tells of a parameter, and of its layers."""

from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint import constants
from deepspeed.module_inject import layers
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups
from torch import Tensor, nn

# What is a linear layer, and what an embedding, with tensor parallelism or without. DeepSpeed has
# these embeddings since 0.19.8, before which ``versions`` refuses tensor parallelism.
LINEARS = (nn.Linear, TensorParallel_Layer)
_SPLIT = ("VocabParallelEmbedding", "HiddenParallelEmbedding")
EMBEDDINGS = (nn.Embedding, *(getattr(layers, name) for name in _SPLIT if hasattr(layers, name)))
_DESCRIPTION = getattr(constants, "DS_AUTOTP_UC_META", "")


def exchanges() -> set[dist.ProcessGroup]:
    """Returns the group whose ranks add up what each of their layers gives, if there is one."""
    group = groups._TENSOR_MODEL_PARALLEL_GROUP
    return set() if group is None else {group}


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the shape that a parameter has without ZeRO-3 and tensor parallelism."""
    told = described(param)
    if told and told["logical_shape"]:
        return tuple(told["logical_shape"])
    return unpartitioned_shape(param)


def unpartitioned_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the shape that a parameter has on this rank without ZeRO-3."""
    return tuple(getattr(param, "ds_shape", param.shape))


def described(param: Tensor) -> dict[str, Any] | None:
    """Returns what the layer of a parameter says of its division, None if nothing."""
    return getattr(param, _DESCRIPTION, None) or None


def is_divided(param: Tensor) -> bool:
    """Returns whether ranks have different parts of a parameter, by what its layer says."""
    told = described(param)
    return told is not None and not told["conversion"]["replicated"]
