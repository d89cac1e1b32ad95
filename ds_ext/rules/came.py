"""CAME: Adafactor with momentum, divided by the deviation of updates from the momentum.

Luo et al., arXiv 2307.02047, algorithm 2, as in the authors' code. There is no bias correction, so
warm up the learning rate: the first update has an RMS of about 11 · lr. The update of a 1-D
parameter is the momentum alone.

    row, col ← EMA, by beta2, of the means of g² + eps1 over each row and column
    u = g / sqrt(row · col / mean(row)),  u ← u / max(1, RMS(u) / clip_threshold)
    m ← EMA, by beta1, of u
    r ← EMA, by beta3, of the means of (u − m)² + eps2 over each row and column
    p ← p (1 − lr · weight_decay) − lr · m / sqrt(r_row · r_col / mean(r_row))

State: ``v["row"]``, ``v["col"]`` and, for vectors, ``v["full"]`` are the authors' exp_avg_sq_row,
exp_avg_sq_col and exp_avg_sq; ``m`` is exp_avg; ``r["row"]``, ``r["col"]`` are exp_avg_res_row and
exp_avg_res_col. A tensor with more than two dimensions is a stack of matrices, and its RMS is taken
over the whole stack. With ``nbits`` 8, ``m`` has FlashAdamW's format (``ops.companding``), the
residual and the update use m as it is stored, and parameters are stepped one by one.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Bits, Fraction, NonNegative, Positive
from ds_ext.ops import formats
from ds_ext.ops.companding import of_bits
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules import factored
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2307.02047",
    state="4/d, or 1.06/d with 8-bit momentum, + 8/R + 8/C",
    rounds="2, or 3; 1 more if a cut goes through 32 elements of 8-bit momentum",
    is_batched=lambda rule, shard: rule.nbits == 32,
    sums_first=factored.sums_first,
)
@dataclass(frozen=True)
class CAME:
    """Adafactor with momentum and a confidence factor (arXiv 2307.02047)."""

    lr: NonNegative = 2e-4  # learning rate
    betas: tuple[Fraction, Fraction, Fraction] = (0.9, 0.999, 0.9999)  # momentum, g², residual
    eps: tuple[NonNegative, NonNegative] = (1e-30, 1e-16)  # added to g², to the residual
    clip_threshold: Positive = 1.0  # largest RMS of an update before momentum
    weight_decay: NonNegative = 0.0  # decoupled, times lr
    nbits: Bits = 32  # bits of a moment's element

    def state_spec(self, shard: Shard) -> Parts:
        m = formats.state_spec(of_bits(self.nbits), shard)
        s: dict[str, Part | Parts] = {"v": factored.state_spec(shard), "m": m}
        return s | {"r": factored.state_spec(shard)} if shard.is_matrix else s

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        beta1, beta2, beta3 = self.betas
        eps1, eps2 = self.eps
        u, _ = yield from factored.normalize(g, s["v"], eps1, beta2, self.clip_threshold, shard)
        m: ops.Readable = s["m"]
        if shard.is_matrix and self.nbits == 32:
            residual: ops.Readable = ops.Residual(u, s["m"], 1 - beta1)  # advances m
        else:
            m = yield from formats.lerp_(of_bits(self.nbits), s["m"], u, 1 - beta1, shard, g)
            residual = ops.plus(u, m, -1.0)
        if shard.is_matrix:
            sums = yield ops.row_col_square_sums(residual, shard, g)
            m = factored.divide_(m, s["r"], sums, eps2, beta3, shard)
        ops.apply_(p, m, shard, lr=self.lr, weight_decay=self.weight_decay)
