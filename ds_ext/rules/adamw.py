"""AdamW: Adam with decoupled weight decay, as torch.optim.AdamW.

Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with lr as alpha and without a schedule
multiplier. Weight decay is multiplied by lr, as in torch.

    m ← EMA, by beta1, of g,  v ← EMA, by beta2, of g²
    u = m̂ / (sqrt(v̂) + eps)
    p ← p (1 − lr · weight_decay) − lr · u

State: ``m`` and ``v`` are runs like the weight, torch's exp_avg and exp_avg_sq. With 8 bits they
have bitsandbytes' format, in blocks of 256 elements of the whole parameter. If a cut splits a
block, a step takes one round.
"""

import functools
from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Bits, Fraction, NonNegative, Positive, Size
from ds_ext.ops import quantize
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules.adam import Adam
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="1711.05101",
    state="8/d; 2/d with 8-bit moments",
    rounds="0; 1 if a cut goes through an 8-bit block",
    is_batched=lambda rule, shard: rule.nbits == 32,
    is_flat=True,
)
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW (arXiv 1711.05101)."""

    lr: NonNegative = 1e-3  # learning rate
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay of the averages of g and of g²
    eps: Positive = 1e-8  # added to the divisor
    weight_decay: NonNegative = 1e-2  # decoupled, times lr
    nbits: Bits = 32  # bits of a moment's element
    min_8bit_size: Size = 4096  # fewer moments than these stay fp32

    def __post_init__(self) -> None:
        if self.nbits == 8:
            quantize.functional()

    def state_spec(self, shard: Shard) -> Parts:
        return self.adam.shard_state_spec(shard)

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        u, p, shard = yield from self.adam.step(p, g, s, shard, *self.adam.biases(t))
        ops.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    @functools.cached_property
    def adam(self) -> Adam:
        """Adam with these hyper-parameters."""
        return Adam.of_bits(self.betas, self.eps, self.nbits, self.min_8bit_size)
