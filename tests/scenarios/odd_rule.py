"""A rule as a user may write it, whose state no native pass reads, and the same in plain torch."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_ext import ops
from ds_ext.hyperparams import Fraction, NonNegative
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import REGISTRY, Rounds, State, register

NAME = "OddMomentum"


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Within it, the rule is registered: its momentum is fp64, whatever the dtype of weights."""

    @register(paper="", state="8/d", rounds="0", is_batched=True)
    @dataclass(frozen=True)
    class OddMomentum:
        """p ← p (1 − lr·wd) − lr · m, with m ← EMA of g."""

        lr: NonNegative = 1e-3
        momentum: Fraction = 0.9
        weight_decay: NonNegative = 0.0

        def state_spec(self, shard: Shard) -> Parts:
            return {"m": replace(Part.like(shard), dtype=torch.float64)}

        def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
            yield from ()
            ops.lerp_(s["m"], g, 1 - self.momentum, shard)
            ops.apply_(p, s["m"], shard, lr=self.lr, weight_decay=self.weight_decay)

    try:
        yield
    finally:
        del REGISTRY[NAME.lower()]


class Reference(torch.optim.Optimizer):
    """The same of whole tensors."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p].get("m", torch.zeros_like(p))  # others may cast it
                    m = self.state[p]["m"] = held.double().lerp(p.grad.double(), 0.1)
                    # Rounded once: a factor 1 - lr * wd would be off alike at every step.
                    p.copy_(p.double() - group["lr"] * (m + group["weight_decay"] * p))
