"""FlashAdamW: AdamW with 8-bit moments. arXiv 2602.23349, algorithm for the optimizer state.

    m ← EMA, by beta1, of g,  v ← EMA, by beta2, of g²
    u = m̂ / (sqrt(v̂) + eps)
    p ← p (1 − lr · weight_decay) − lr · u

The update is computed from m and v before they are rounded. State: ``m`` and ``v``, with an 8-bit
code per element and a 16-bit scale per 32 elements of the whole parameter. ``ops.companding``
defines the formats, and documents where scales differ from the paper. If a cut splits a group, a
step takes one round.
"""

import functools
from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Fraction, NonNegative, Positive
from ds_ext.ops import companding, formats
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules.adam import Adam
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2602.23349",
    state="2.125/d",
    rounds="0; 1 if a cut goes through 32 elements",
    is_batched=lambda rule, shard: not formats.splits_groups(shard, companding.MOMENT.size),
    is_flat=True,
)
@dataclass(frozen=True)
class FlashAdamW:
    """AdamW with moments of 8 bits, companded (arXiv 2602.23349)."""

    lr: NonNegative = 1e-3  # learning rate
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay of the averages of g and of g²
    eps: Positive = 1e-8  # added to the divisor
    weight_decay: NonNegative = 1e-2  # decoupled, times lr

    def state_spec(self, shard: Shard) -> Parts:
        return self.adam.shard_state_spec(shard)

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        u, p, shard = yield from self.adam.step(p, g, s, shard, *self.adam.biases(t))
        ops.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    @functools.cached_property
    def adam(self) -> Adam:
        """Adam with these hyper-parameters."""
        return Adam(self.betas, self.eps, (companding.MOMENT, companding.SQUARES))
