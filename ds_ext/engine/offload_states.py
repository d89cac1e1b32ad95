"""``engine.offload_states()`` and ``reload_states()``, which free device memory temporarily.

Programs call them between steps to generate with another engine on the same device. Unlike with
``offload_optimizer``, states are on the host only between the two calls.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor

from ds_ext.backward import error_texts, streams
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.backward.int8_weights import unsupported
from ds_ext.ops import int8
from ds_ext.optimizer import host_offload


@dataclass
class OffloadedStates:
    """Moves a model's weights, states and gradients to the host, and back."""

    fused: FusedBackward
    kinds: set[OffloadStateTypeEnum] = field(default_factory=set)  # of states on the host

    def offload(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states to the host; see DeepSpeed's ``engine.offload_states``.

        Args:
            include: the kinds to move: optim_states, hp_params (masters), lp_params (weights),
                lp_grads (kept gradients); None for all.
            device: must be the CPU.
            pin_memory: whether to pin the memory, if there is a GPU.
            non_blocking: has no effect: the call waits for the copies.

        Raises:
            ValueError: the device is not the CPU, or weights are stored in 8 bits.
        """
        self.fused.check_owner()
        if any(map(int8.find, self.fused.layout.names)):
            raise unsupported("offload_states")
        if OffloadDeviceEnum(device) != OffloadDeviceEnum.cpu:
            raise ValueError(
                f"offload_states: device is {device!r}; allowed: OffloadDeviceEnum.cpu."
            )
        asked = {kind for kind in OffloadStateTypeEnum if include is None or kind in include}
        asked.discard(OffloadStateTypeEnum.contiguous_grad_buffer)  # there is none
        pinned = pin_memory and torch.cuda.is_available()

        def on_host(x: Tensor) -> Tensor:
            if x.device == host_offload.HOST:
                return x
            empty = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned)
            return empty.copy_(x)

        self._move(asked - self.kinds, on_host)
        self.kinds |= asked

    def reload(self, non_blocking: bool = False) -> None:
        """Moves all offloaded tensors back to the device, and waits for the copies."""
        device = self.fused.layout.device
        self._move(self.kinds, lambda x: x.to(device, non_blocking=True))
        self.kinds = set()
        streams.synchronize(device)
        self.fused.layout.end_step()  # gathers persistent parameters

    def check(self, method: str = "") -> None:
        """Raises RuntimeError if ``method`` needs offloaded data, or another engine took over."""
        if self.fused.ended == error_texts.REPLACED:  # at stage 3 forward would gather nothing
            raise RuntimeError(error_texts.REPLACED)
        reads_weights_only = method == "forward" and not torch.is_grad_enabled()
        away = self.kinds & {OffloadStateTypeEnum.lp_params} if reads_weights_only else self.kinds
        if away:
            raise RuntimeError(
                f"{', '.join(sorted(kind.value for kind in away))} are on the host since "
                "engine.offload_states(): call engine.reload_states() first."
            )

    def _move(self, kinds: set[OffloadStateTypeEnum], move: Callable[[Tensor], Tensor]) -> None:
        if OffloadStateTypeEnum.lp_params in kinds:
            for values in self.fused.layout.stored():
                values.data = move(values.data)
        if OffloadStateTypeEnum.lp_grads in kinds:
            for param, run in self.fused.state.kept.items():
                self.fused.state.kept[param] = run._replace(g=move(run.g))
        optimizer = self.fused.optimizer
        if optimizer.offload is None:  # otherwise states stay on the host
            with_masters = OffloadStateTypeEnum.hp_params in kinds
            with_others = OffloadStateTypeEnum.optim_states in kinds
            optimizer.move_states(lambda k: with_masters if k == "master" else with_others, move)
