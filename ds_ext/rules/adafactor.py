"""Adafactor. Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5, as in transformers.Adafactor.

With ``beta1``, the momentum averages updates that are already scaled by the learning rate, as in
transformers and unlike the paper.

    alpha = lr, or min(1e-2, 1 / sqrt(t)) with relative_step; · max(eps2, RMS(p)) if scale_parameter
    row, col ← EMA, by 1 − t^decay_rate, of the means of g² + eps1 over each row and column
    u = g / sqrt(row · col / mean(row)),  u ← u / max(1, RMS(u) / clip_threshold)
    p ← p (1 − alpha · weight_decay) − alpha · u,  or − m, with m ← EMA, by beta1, of alpha · u

State: ``v["row"]``, ``v["col"]`` and, for vectors, ``v["full"]`` are transformers' exp_avg_sq_row,
exp_avg_sq_col and exp_avg_sq; ``m`` is its exp_avg. A tensor with more than two dimensions is a
stack of matrices, and its RMS is taken over the whole stack.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ds_ext import ops
from ds_ext.hyperparams import Bits, Fraction, Negative, NonNegative, Positive
from ds_ext.ops import formats
from ds_ext.ops.companding import of_bits
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules import factored
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="1804.04235",
    state="4/R + 4/C, and 4/d with `beta1`, or 1.06/d in 8 bits",
    rounds="1, or 2; 1 more if a cut goes through 32 elements of 8-bit momentum",
    is_batched=lambda rule, shard: rule.nbits == 32,
    sums_first=factored.sums_first,
    relative=lambda rule: rule.scale_parameter,
)
@dataclass(frozen=True)
class Adafactor:
    """As transformers.Adafactor, flags included (arXiv 1804.04235)."""

    lr: NonNegative | None = None  # only with relative_step=False; 0 steps nothing
    eps: tuple[NonNegative, NonNegative] = (1e-30, 1e-3)  # added to g², least RMS(p)
    clip_threshold: Positive = 1.0  # largest RMS of the update
    decay_rate: Negative = -0.8  # beta2 is 1 - t ** decay_rate
    beta1: Fraction | None = None  # momentum; None keeps none
    weight_decay: NonNegative = 0.0  # decoupled, times the step size
    scale_parameter: bool = True  # step size relative to RMS(p)
    relative_step: bool = True  # step size from t alone
    warmup_init: bool = False  # relative step size grows from 1e-6
    nbits: Bits = 32  # bits of a moment's element

    def __post_init__(self) -> None:
        if self.relative_step and self.lr:  # torch's DCP sets lr to 0 temporarily: allow it
            raise ValueError(
                f"lr={self.lr} and relative_step=true exclude each other: with relative_step the "
                "step size comes from the step count. Set relative_step to false to use lr."
            )
        if not self.relative_step and self.lr is None:
            raise ValueError("lr is missing: relative_step=false takes the step size from lr.")
        if self.warmup_init and not self.relative_step:
            raise ValueError("warmup_init=true needs relative_step=true.")
        if self.nbits == 8 and self.beta1 is None:
            raise ValueError("nbits=8 needs beta1: without momentum, there is no moment to store.")

    def state_spec(self, shard: Shard) -> Parts:
        s: dict[str, Part | Parts] = {"v": factored.state_spec(shard)}
        if self.beta1 is not None:
            s["m"] = formats.state_spec(of_bits(self.nbits), shard)
        return s

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        eps1, eps2 = self.eps
        beta2 = 1 - t**self.decay_rate
        u, (p_sq,) = yield from factored.normalize(
            g, s["v"], eps1, beta2, self.clip_threshold, shard, ops.square_sum(p, shard, g)
        )
        alpha: Tensor | float = self.step_size(t)
        if self.scale_parameter:
            alpha = alpha * shard.rms(p_sq).clamp(min=eps2)
        if self.beta1 is None:
            ops.apply_(p, u, shard, lr=alpha, weight_decay=self.weight_decay)
        else:  # m averages updates that are already multiplied by alpha
            x, weight = ops.times(u, alpha), 1 - self.beta1
            m = yield from formats.lerp_(of_bits(self.nbits), s["m"], x, weight, shard, g)
            ops.apply_(p, m, shard, lr=1, weight_decay=alpha * self.weight_decay)

    def step_size(self, t: int) -> float:
        """Returns ``lr``, or with ``relative_step`` min(1e-2, 1 / sqrt(t))."""
        if self.lr is not None:  # not relative_step, or 0
            return self.lr
        return min(1e-6 * t if self.warmup_init else 1e-2, 1 / math.sqrt(t))
