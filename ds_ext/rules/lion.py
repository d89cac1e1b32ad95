"""Lion: steps by the sign of a momentum. Chen et al., arXiv 2302.06675, algorithm 2.

    c = beta1 · m + (1 − beta1) · g,  m ← beta2 · m + (1 − beta2) · g
    p ← p (1 − lr · weight_decay) − lr · sign(c)

State: ``m`` is a run like the weight. With 8 bits it has FlashAdamW's format (``ops.companding``).
If a cut then splits a group of 32 elements, a step takes one round.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Bits, Fraction, NonNegative
from ds_ext.ops import formats
from ds_ext.ops.companding import of_bits
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2302.06675",
    state="4/d; 1.06/d with 8-bit momentum",
    rounds="0; 1 if a cut goes through 32 elements of 8-bit momentum",
    is_batched=lambda rule, shard: not formats.splits_groups(shard, of_bits(rule.nbits).size),
    is_flat=True,
)
@dataclass(frozen=True)
class Lion:
    """The sign of a momentum, the same step for every weight (arXiv 2302.06675)."""

    lr: NonNegative = 1e-4  # learning rate
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)  # decay in the update, in the stored momentum
    weight_decay: NonNegative = 0.0  # decoupled, times lr
    nbits: Bits = 32  # bits of a moment's element

    def state_spec(self, shard: Shard) -> Parts:
        return {"m": formats.state_spec(of_bits(self.nbits), shard)}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        p, x, shard = yield from formats.whole_groups(p, g, shard, of_bits(self.nbits).size)
        u = ops.SignStep(of_bits(self.nbits).opened(s["m"]), x, *self.betas)
        ops.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)
