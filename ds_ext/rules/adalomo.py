"""AdaLomo: Adafactor's update, scaled relative to the RMS of the weights.

Lv et al., arXiv 2310.10195, algorithm 1, with the second moment's decay from the authors' code:

    beta2 = 1 − t^decay_rate
    row, col ← EMA, by beta2, of the means of g² + eps1 over each row and column
    u = g / sqrt(row · col / mean(row)),  u ← u / max(1, RMS(u) / clip_threshold)
    alpha = lr · max(eps2, RMS(p))
    p ← p (1 − alpha · weight_decay) − alpha · u

State: ``v["row"]``, ``v["col"]`` and, for vectors, ``v["full"]`` are the authors' exp_avg_sq_row,
exp_avg_sq_col and exp_avg_sq. A tensor with more than two dimensions is a stack of matrices, and
its RMS is taken over the whole stack.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Negative, NonNegative, Positive
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules import factored
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2310.10195",
    state="4/R + 4/C",
    rounds="1, or 2",
    is_batched=True,
    sums_first=factored.sums_first,
    relative=True,
)
@dataclass(frozen=True)
class AdaLomo:
    """Adafactor's update, scaled relative to the RMS of the weights (arXiv 2310.10195)."""

    lr: NonNegative = 1e-3  # relative to RMS(p)
    eps: tuple[NonNegative, NonNegative] = (1e-30, 1e-3)  # added to g², least RMS(p)
    clip_threshold: Positive = 1.0  # largest RMS of the update
    decay_rate: Negative = -0.8  # beta2 is 1 - t ** decay_rate
    weight_decay: NonNegative = 0.0  # decoupled, times lr · RMS(p)

    def state_spec(self, shard: Shard) -> Parts:
        return {"v": factored.state_spec(shard)}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        eps1, eps2 = self.eps
        beta2 = 1 - t**self.decay_rate
        u, (p_sq,) = yield from factored.normalize(
            g, s["v"], eps1, beta2, self.clip_threshold, shard, ops.square_sum(p, shard, g)
        )
        alpha = self.lr * shard.rms(p_sq).clamp(min=eps2)
        ops.apply_(p, u, shard, lr=alpha, weight_decay=self.weight_decay)
