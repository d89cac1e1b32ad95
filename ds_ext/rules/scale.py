"""SCALE: gradient descent, with each output's gradients divided by their RMS.

Glentis et al., arXiv 2506.16659, algorithm 1, as in the authors' code:

    m ← EMA, by ``momentum``, of g; g itself if ``momentum`` is 0
    u = m, with each row (or column) divided by max(its RMS, eps)
    p ← p (1 − lr · weight_decay) − lr · u

The paper writes a layer as x·W, and divides the columns of W, one for each output. torch's linear
layers store W transposed, so rows are divided. Embeddings store W itself, so columns are divided.
Only the output head has momentum. It needs no bias correction: u does not depend on the size of m.

State: ``m`` is the authors' moment1.

Dividing rows takes no round if runs hold whole rows, else one. Dividing columns takes one round.
The paper steps vectors with AdamW. If a script's own param group contains other shapes, a tensor
with more than two dimensions is a stack of matrices, and a parameter with fewer is one row.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Axis, Fraction, NonNegative, Positive
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2506.16659",
    state="0; 4/d of the output head",
    rounds="0, or 1",
    is_batched=True,
    sums_first=lambda rule, shard: rule.sums_first(shard),
    others={"type": "AdamW"},
    any_shape=True,
    embedding={"norm_axis": "column"},
    head={"momentum": 0.9},
    has_sections=True,
)
@dataclass(frozen=True)
class SCALE:
    """Gradient descent with normalized rows or columns (arXiv 2506.16659)."""

    lr: NonNegative = 1e-3  # learning rate
    norm_axis: Axis = "row"  # what is divided by its RMS
    momentum: Fraction = 0.0  # its decay rate; 0: none
    eps: Positive = 1e-8  # least RMS of a row or column
    weight_decay: NonNegative = 0.0  # decoupled, times lr

    def state_spec(self, shard: Shard) -> Parts:
        return {"m": Part.like(shard)} if self.momentum else {}

    def sums_first(self, shard: Shard) -> bool:
        """Returns whether a step needs totals, and writes no momentum before it has them."""
        return not self.momentum and (self.norm_axis == "column" or not shard.holds_rows)

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        m: ops.Readable = g
        if self.momentum:
            ops.lerp_(s["m"], g, 1 - self.momentum, shard)
            m = s["m"]
        x = ops.unit_quotient(m, shard, g)
        if self.norm_axis == "column":
            (sums,) = yield ops.row_col_square_sums(x, shard, g)[1:]
            x = ops.normalize_columns(x, sums, self.eps * shard.rows**0.5, shard)
        elif shard.holds_rows:  # needs no round
            x, _ = ops.normalize_whole_rows(x, self.eps * shard.cols**0.5, shard, g)
        else:
            (sums,) = yield ops.row_col_square_sums(x, shard, g)[:1]
            x = ops.normalize_rows(x, sums, self.eps * shard.cols**0.5, shard)
        ops.apply_(p, x, shard, lr=self.lr, weight_decay=self.weight_decay)
