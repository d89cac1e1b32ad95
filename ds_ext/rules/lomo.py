"""LOMO: gradient descent without state. Lv et al., arXiv 2306.09782, algorithm 1.

p ← p (1 − lr · weight_decay) − lr · g
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import NonNegative
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules.base import Rounds, State, register


@register(paper="2306.09782", state="0", rounds="0", is_batched=True, is_flat=True)
@dataclass(frozen=True)
class LOMO:
    """Gradient descent without state: p ← p(1 − lr·wd) − lr·g (arXiv 2306.09782)."""

    lr: NonNegative = 1e-3  # learning rate
    weight_decay: NonNegative = 0.0  # decoupled, times lr

    def state_spec(self, shard: Shard) -> Parts:
        return {}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        ops.apply_(p, g, shard, lr=self.lr, weight_decay=self.weight_decay)
        yield from ()
