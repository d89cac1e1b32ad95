"""Attributes that DeepSpeed sets on parameters: ZeRO-3 partitions, and AutoTP splits."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from deepspeed.checkpoint import constants
from deepspeed.module_inject import layers
from torch import Tensor, nn

# Types of linear layers and embeddings, with and without tensor parallelism.
LINEARS = (nn.Linear, layers.TensorParallel_Layer)
EMBEDDINGS = (nn.Embedding, layers.VocabParallelEmbedding, layers.HiddenParallelEmbedding)


class DeepSpeedParameter(Protocol):
    """A parameter that ZeRO-3 has partitioned, or that DeepSpeed has marked as an expert's."""

    ds_shape: torch.Size  # of the whole parameter
    ds_tensor: Tensor  # this rank's run, [ceil(numel / ranks)], the tail padded
    ds_secondary_tensor: Tensor | None  # hpZ's second copy
    ds_process_group: Any  # the ranks that share the parameter
    ds_id: int  # the order of gathers
    ds_status: Any  # whether it is partitioned, being gathered, or gathered
    ds_summary: Callable[[], Any]  # describes it in errors
    ds_persist: bool  # whether it stays gathered between steps
    all_gather: Callable[..., Any]  # gathers a list of parameters, by default itself
    partition: Callable[..., None]  # partitions a list of parameters, by default itself
    all_gather_coalesced: Callable[..., Any]  # gathers a list of parameters; returns a handle
    group_name: str  # the name of the expert group, if it belongs to an expert


def deepspeed_parameter(param: Tensor) -> DeepSpeedParameter:
    """Casts a parameter to the type that has DeepSpeed's attributes."""
    return cast(DeepSpeedParameter, param)


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
