"""What DeepSpeed sets on parameters, by its own names and with types."""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class DeepSpeedParameter(Protocol):
    """A parameter that DeepSpeed has partitioned (ZeRO-3), or marked as an expert's."""

    ds_shape: torch.Size  # of the whole parameter
    ds_tensor: Tensor  # this rank's run, [ceil(numel / ranks)], the tail padded
    ds_secondary_tensor: Tensor | None  # hpZ's second copy
    ds_process_group: Any  # the ranks among which it is cut
    ds_persist: bool  # whether it stays gathered between steps
    all_gather_coalesced: Callable[..., Any]  # gathers any parameters, and returns a handle
    group_name: str  # of its ranks, where it belongs to an expert


def deepspeed_parameter(param: Tensor) -> DeepSpeedParameter:
    """Returns the same parameter, typed as one that has DeepSpeed's attributes."""
    return cast(DeepSpeedParameter, param)
