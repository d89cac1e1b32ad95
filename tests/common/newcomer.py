"""A rule that is registered after the others: what the tests' tables have to take up by itself."""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Fraction, NonNegative
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import REGISTRY, Rounds, State, register

NAME = "newcomer"


def enter(is_broken: bool = False) -> None:
    """Registers the rule; one that is broken forgets to ask for the total of its sums."""

    @register(paper="", state="4/d", rounds="1")
    @dataclass(frozen=True)
    class Newcomer:
        """p ← p (1 − lr·wd) − lr · m / RMS(m), with m ← EMA of g."""

        lr: NonNegative = 1e-3
        momentum: Fraction = 0.5
        weight_decay: NonNegative = 0.0

        def state_spec(self, shard: Shard) -> Parts:
            return {"m": Part.like(shard)}

        def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
            ops.lerp_(s["m"], g, 1 - self.momentum, shard)
            own = ops.square_sum(s["m"], shard, g)
            (total,) = yield (own,)
            rms = shard.rms(own if is_broken else total)
            factor = (1 / rms).where(rms > 0, 0.0)
            ops.apply_(p, s["m"], shard, lr=self.lr * factor, weight_decay=self.weight_decay * rms)


def leave() -> None:
    del REGISTRY[NAME]
