"""What lies in the host's memory between steps, and visits the device for its step.

Weights (``offload_param``: ZeRO-3's runs, which DeepSpeed puts there) and states
(``offload_optimizer``) are copied to the device of their gradient, stepped there, and copied back.
A step by the host would move less, a gradient's 2 bytes for each bf16 weight instead of 4, but
passes over memory several times where a GPU hides that behind the copies; and it sums in another
order, so that it would not end with the bits of a run without offload, as this does.
``python -m benchmarks offload`` measures both. What travels at a time is what a bucket needs.
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
class Home:
    """The host's memory as the place of states, pinned or not."""

    pins: bool

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "Home | None":
        """What ``zero_optimization.offload_optimizer`` asks for. Only a GPU has pinned memory."""
        if section.get("device") != "cpu":
            return None
        return cls(section.get("pin_memory", True) and torch.cuda.is_available())

    def keep(self, x: Tensor, held: Tensor | None = None) -> Tensor:
        """Puts ``x`` where it lies between steps -> that: ``held``, if it lay there before."""
        if x is held or x.nbytes < SMALL:
            return x
        if held is None or (held.shape, held.dtype) != (x.shape, x.dtype):
            held = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=self.pins)
        return held.copy_(x, non_blocking=True)

    def take(self, state: State, stepped: State) -> None:
        """Puts a state that has visited the device back to where it lies."""
        for key in state.keys() - stepped.keys():
            del state[key]
        for key, x in stepped.items():
            if isinstance(x, dict):
                self.take(state.setdefault(key, {}), x)  # type: ignore[arg-type]
            else:
                state[key] = self.keep(x, state.get(key)) if isinstance(x, Tensor) else x  # type: ignore[arg-type]


def visit(x: Tensor, device: torch.device) -> Tensor:
    """``x`` itself, or its copy on ``device``, which the host waits for only if it is the place."""
    return x if x.device == device else x.to(device, non_blocking=device.type != HOST.type)


def brought(state: State, device: torch.device) -> State:
    """A state whose tensors are on ``device``."""
    found: State = {}
    for key, x in state.items():
        found[key] = brought(x, device) if isinstance(x, dict) else x
        if isinstance(x, Tensor):
            found[key] = visit(x, device)
    return found


def place(x: Tensor, device: torch.device, home: Home | None) -> Tensor:
    """A part of a state where it lies between steps: with ``home``, or on ``device``."""
    return visit(x, device) if home is None or x.nbytes < SMALL else home.keep(x)


def settle(device: torch.device) -> None:
    """Waits until what was sent to the host is there: who reads it waits for nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
