"""SinkGD: gradient descent with rows and columns of the gradient normalized. No state.

Scetbon et al., arXiv 2502.06742, algorithms 3 and 4:

    x = g; ``iterations`` times:
        x ← each row of x, scaled to the norm √cols
        x ← each column of x, scaled to the norm √rows
    p ← p (1 − a · weight_decay) − a · x,  a = lr · alpha

Norms below ``eps`` count as ``eps``. In every iteration x is g times a row factor and a column
factor. A step keeps only these factors, 4·(R + C) bytes, and reads g again.

If runs hold whole rows (``Shard.holds_rows``), an iteration takes one read of g and one round with
a number per column. Otherwise it takes two of both, because column sums need the rows' factors.
Zeros stay zeros; rows with a norm below 1e-17 stay small.

The rule is for the matrices of linear layers. FlashAdamW steps embeddings, the output head and
vectors, which the paper steps with Adam. If a script's own param group contains other shapes, a
tensor with more than two dimensions is a stack of matrices, and a parameter with fewer is one row,
so that only signs remain.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Count, NonNegative, Positive
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2502.06742",
    state="0",
    rounds="5, or 10",
    is_batched=True,
    sums_first=True,
    others={"type": "FlashAdamW"},
    any_shape=True,
    has_sections=True,
)
@dataclass(frozen=True)
class SinkGD:
    """Gradient descent with normalized rows and columns, without state (arXiv 2502.06742)."""

    lr: NonNegative = 1e-3  # learning rate, times alpha
    iterations: Count = 5  # of normalizing rows, then columns
    alpha: NonNegative = 0.05  # times lr: x has an RMS of 1, larger than Adam's update
    eps: Positive = 1e-8  # least norm of a row or column
    weight_decay: NonNegative = 0.0  # decoupled, times lr · alpha

    def state_spec(self, shard: Shard) -> Parts:
        return {}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        x = ops.unit_quotient(g, shard, g)
        for _ in range(self.iterations):
            if shard.holds_rows:
                x, sums = ops.normalize_whole_rows(x, self.eps, shard, g)
            else:
                (sums,) = yield ops.row_col_square_sums(x, shard, g)[:1]
                x = ops.normalize_rows(x, sums, self.eps, shard)
                sums = ops.row_col_square_sums(x, shard, g)[1]
            (sums,) = yield (sums,)
            x = ops.normalize_columns(x, sums, self.eps, shard)
        ops.apply_(p, x, shard, lr=self.lr * self.alpha, weight_decay=self.weight_decay)
