"""``engine.offload_states()`` and ``reload_states()``: a model's memory is lent for a while.

Programs that generate with another engine on the same device call them between steps. Not to be
confused with ``offload_optimizer``, whose states lie on the host all the time.
"""

from collections.abc import Callable, Container
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor

from ds_ext.backward.gradients import FusedBackward
from ds_ext.ops.weight_update import MASTER
from ds_ext.optimizer import host_offload

Move: TypeAlias = Callable[[Tensor], Tensor]


class MovedStates:
    """What of an engine's model lies on the host until it is reloaded.

    Args:
        fused: steps the model.
    """

    def __init__(self, fused: FusedBackward) -> None:
        self.fused = fused
        self.kinds: set[OffloadStateTypeEnum] = set()  # that have been moved

    def offload(self, include: Container[Any] | None, device: Any, pin_memory: bool) -> None:
        """Moves to the host what is not there; see DeepSpeed's ``engine.offload_states``.

        Args:
            include: kinds: optim_states, hp_params (masters), lp_params (weights), lp_grads (kept
                gradients); None for all.
            device: the host.
            pin_memory: whether the memory there is pinned, if there is a GPU.

        Raises:
            ValueError: for another device.
        """
        if OffloadDeviceEnum(device) != OffloadDeviceEnum.cpu:
            raise ValueError(
                f"offload_states: device is {device!r}; allowed: OffloadDeviceEnum.cpu."
            )
        kinds = {k for k in _KINDS if k not in self.kinds and (include is None or k in include)}
        pinned = pin_memory and torch.cuda.is_available()
        self._move(kinds, lambda x: _on_host(x, pinned))
        self.kinds |= kinds

    def reload(self) -> None:
        """Moves back to the device what ``offload`` has moved."""
        device = self.fused.layout.device
        self._move(self.kinds, lambda x: x.to(device, non_blocking=True))
        self.kinds = set()
        host_offload.synchronize(device)
        self.fused.layout.end_step()  # gathers what stays gathered

    def check(self) -> None:
        """Raises RuntimeError if something is still on the host."""
        if self.kinds:
            raise RuntimeError(
                f"{', '.join(sorted(kind.value for kind in self.kinds))} are on the host since "
                "engine.offload_states(): call engine.reload_states() first."
            )

    def _move(self, kinds: set[OffloadStateTypeEnum], move: Move) -> None:
        if OffloadStateTypeEnum.lp_params in kinds:
            for values in self.fused.layout.stored():
                values.data = move(values.data)
        if OffloadStateTypeEnum.lp_grads in kinds:
            self.fused.move_kept(move)
        optimizer = self.fused.optimizer
        if optimizer.offload is None:  # or they lie on the host in any case
            optimizer.move_states(lambda key: _kind_of(key) in kinds, move)


def _kind_of(key: str) -> OffloadStateTypeEnum:
    """Of which kind a state is, by its key."""
    kinds = OffloadStateTypeEnum
    return kinds.hp_params if key in MASTER else kinds.optim_states


_KINDS = (
    OffloadStateTypeEnum.optim_states,
    OffloadStateTypeEnum.hp_params,
    OffloadStateTypeEnum.lp_params,
    OffloadStateTypeEnum.lp_grads,
)


def _on_host(x: Tensor, pinned: bool) -> Tensor:
    """A tensor as it is if it lies on the host, else its copy there."""
    if x.device == host_offload.HOST:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=host_offload.HOST, pin_memory=pinned).copy_(x)
