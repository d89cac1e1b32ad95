"""Attributes that DeepSpeed sets on parameters: ZeRO-3 partitions, and AutoTP splits."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.module_inject import layers
from torch import Tensor, nn

# Types of linear layers and embeddings, with and without tensor parallelism.
LINEARS = (nn.Linear, layers.TensorParallel_Layer)
EMBEDDINGS = (nn.Embedding, layers.VocabParallelEmbedding, layers.HiddenParallelEmbedding)


def deepspeed_parameter(param: Tensor) -> Any:
    """Returns the parameter; types of DeepSpeed's attributes (``contract.json``) are unknown."""
    return param


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter before ZeRO-3 and tensor parallelism divide it."""
    described = description(param)
    if described and described["logical_shape"]:
        return tuple(described["logical_shape"])
    return unpartitioned_shape(param)


def unpartitioned_shape(param: Tensor) -> tuple[int, ...]:
    """Returns the shape of this rank's parameter before ZeRO-3 partitions it."""
    return tuple(getattr(param, "ds_shape", param.shape))


def description(param: Tensor) -> dict[str, Any] | None:
    """Returns AutoTP's description of how a parameter is split; None if there is none."""
    return getattr(param, constants.DS_AUTOTP_UC_META, None) or None


def is_divided(param: Tensor) -> bool:
    """Returns whether AutoTP has split a parameter among ranks."""
    described = description(param)
    return described is not None and not described["conversion"]["replicated"]


@contextlib.contextmanager
def as_vectors(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which 0-d parameters have one dimension, because DeepSpeed broadcasts bytes."""
    scalars = [p for p in params if p.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    yield
    for param in scalars:
        if param.numel():  # not partitioned within the context
            param.data = param.data.view(())
