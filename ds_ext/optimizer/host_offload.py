"""Offload: weights and states lie in the host's memory between steps.

Weights (``offload_param``, for which DeepSpeed stores ZeRO-3's runs there) and states
(``offload_optimizer``) are copied to the device of their gradient, stepped there, and copied back,
one bucket at a time. A step on the host would copy 2 bytes per bf16 weight instead of 4. But it
needs several passes over host memory, and it adds numbers in another order. A step on the GPU
overlaps with the copies, and gives the same bits as training without offload.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops.state import NestedState, mapped
from ds_ext.optimizer.updates import RunUpdate

HOST = torch.device("cpu")
SMALL = 2**17  # bytes; launching the copy of a smaller tensor takes as long, so it stays


@dataclass(frozen=True)
class HostOffload:
    """Stores states in the host's memory between steps.

    Attributes:
        pin_memory: whether the memory is pinned, so that the host does not wait for copies.
    """

    pin_memory: bool

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "HostOffload | None":
        """Reads ``zero_optimization.offload_optimizer``.

        Returns:
            None unless ``device`` is "cpu". Memory is pinned by default if there is a GPU.
        """
        if section.get("device") != "cpu":
            return None
        return cls(section.get("pin_memory", True) and torch.cuda.is_available())

    def to_host(self, x: Tensor, stored: Tensor | None = None) -> Tensor:
        """Returns ``x`` as it is stored between steps: on the host, unless it is ``SMALL``.

        It overwrites ``stored``, the tensor stored before, if shape and dtype fit.
        """
        if x is stored or x.nbytes < SMALL:
            return x
        if stored is None or (stored.shape, stored.dtype) != (x.shape, x.dtype):
            stored = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=self.pin_memory)
        return stored.copy_(x, non_blocking=True)

    def store_state(self, state: NestedState, stepped: NestedState) -> None:
        """Overwrites the stored ``state`` by its copy that was stepped."""
        for key in state.keys() - stepped.keys():
            del state[key]
        for key, x in stepped.items():
            if isinstance(x, dict):
                self.store_state(state.setdefault(key, {}), x)  # type: ignore[arg-type]
            else:
                state[key] = self.to_host(x, state.get(key)) if isinstance(x, Tensor) else x  # type: ignore[arg-type]


def on_device_of_gradients(
    stored: Sequence[RunUpdate], stored_states: Sequence[NestedState], offload: HostOffload | None
) -> tuple[Sequence[RunUpdate], Sequence[NestedState], Callable[[], None]]:
    """Copies the runs of a bucket and their states to the device of the gradients, which is one.

    Without ``offload``, the states are on that device already.

    Returns:
        The runs, the states, and a function that copies both back to where they are stored.
    """
    device = stored[0].g.device
    updates = [u._replace(p=to_device(u.p, device)) for u in stored]
    states = (
        stored_states if offload is None else [state_to_device(s, device) for s in stored_states]
    )

    def write_back() -> None:
        for old, new in zip(stored, updates, strict=True):
            if new.p is not old.p:
                old.p.copy_(new.p, non_blocking=True)
        if offload is not None:
            for state, stepped in zip(stored_states, states, strict=True):
                offload.store_state(state, stepped)

    return updates, states, write_back


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns ``x`` or its copy on ``device``; only copies to the host are synchronous."""
    return x if x.device == device else x.to(device, non_blocking=device.type != HOST.type)


def state_to_device(state: NestedState, device: torch.device) -> NestedState:
    """Returns a state, nested in dicts, whose tensors are on ``device``."""
    found: NestedState = mapped(state, lambda x: to_device(x, device))
    return found


def store(x: Tensor, device: torch.device, offload: HostOffload | None) -> Tensor:
    """Returns a tensor of a state where it lies between steps.

    Small tensors, and all without ``offload``, lie on ``device``.
    """
    return to_device(x, device) if offload is None or x.nbytes < SMALL else offload.to_host(x)
