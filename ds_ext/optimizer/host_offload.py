"""Offload: weights and states that lie in the host's memory between steps.

Weights (``offload_param``: ZeRO-3's runs, which DeepSpeed puts there) and states
(``offload_optimizer``) are copied to the device of their gradient, stepped there, and copied back.
A step by the host would move less, a gradient's 2 bytes for each bf16 weight instead of 4, but
passes over memory several times where a GPU hides that behind the copies; and it sums in another
order, so that it would not end with the bits of a run without offload, as this does.
``python -m benchmarks offload`` measures both. Only what a bucket needs is copied at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops.state import State

HOST = torch.device("cpu")
SMALL = 2**17  # bytes of a state that stays on the device: to ask for a copy takes as long


@dataclass(frozen=True)
class HostOffload:
    """Where states lie between steps if they are offloaded: the host's memory.

    Attributes:
        pin_memory: whether that memory is pinned, so that the host does not wait for copies.
    """

    pin_memory: bool

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "HostOffload | None":
        """Returns what ``zero_optimization.offload_optimizer`` asks for.

        Args:
            section: that section of a DeepSpeed config.

        Returns:
            None unless its ``device`` is "cpu". Memory is pinned if there is a GPU to copy to.
        """
        if section.get("device") != "cpu":
            return None
        return cls(section.get("pin_memory", True) and torch.cuda.is_available())

    def to_host(self, x: Tensor, stored: Tensor | None = None) -> Tensor:
        """Returns ``x`` as it is stored between steps: on the host, if it is not ``SMALL``.

        Args:
            x: part of a state, on any device.
            stored: what was stored of it before, which is overwritten if it fits.
        """
        if x is stored or x.nbytes < SMALL:
            return x
        if stored is None or (stored.shape, stored.dtype) != (x.shape, x.dtype):
            stored = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=self.pin_memory)
        return stored.copy_(x, non_blocking=True)

    def store_state(self, state: State, stepped: State) -> None:
        """Overwrites ``state``, which lies on the host, by its copy that was stepped."""
        for key in state.keys() - stepped.keys():
            del state[key]
        for key, x in stepped.items():
            if isinstance(x, dict):
                self.store_state(state.setdefault(key, {}), x)  # type: ignore[arg-type]
            else:
                state[key] = self.to_host(x, state.get(key)) if isinstance(x, Tensor) else x  # type: ignore[arg-type]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Returns ``x`` or its copy on ``device``; the host waits only for copies to itself."""
    return x if x.device == device else x.to(device, non_blocking=device.type != HOST.type)


def state_to_device(state: State, device: torch.device) -> State:
    """Returns a state, nested in dicts, whose tensors are on ``device``."""
    found: State = {}
    for key, x in state.items():
        found[key] = state_to_device(x, device) if isinstance(x, dict) else x
        if isinstance(x, Tensor):
            found[key] = to_device(x, device)
    return found


def store(x: Tensor, device: torch.device, offload: HostOffload | None) -> Tensor:
    """Returns part of a state where it lies between steps.

    Args:
        x: the part, on any device.
        device: that of the parameter.
        offload: where states lie; None for ``device``, where small parts are in any case.
    """
    return to_device(x, device) if offload is None or x.nbytes < SMALL else offload.to_host(x)


def synchronize(device: torch.device) -> None:
    """Waits until copies from ``device`` to the host have ended, which any code may then read."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
