"""The second moment of a parameter: row and column statistics of a matrix, or one per element.

A matrix has ``{"row": [mats, rows], "col": [mats, cols]}``, replicated on all ranks. Only sums over
the whole parameter change it, so it does not depend on the number of ranks. A parameter with fewer
than two dimensions has ``{"full": run}``, which is sharded like the parameter and needs no sums.
The estimate of a matrix's second moment is row · col / mean(row). It needs no reduction of its own,
because mean(row) equals mean(col). Source: Shazeer and Stern, arXiv 1804.04235, section 3.
"""

import math
from collections.abc import Generator

from torch import Tensor

from ds_ext import ops
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part
from ds_ext.rules.base import Sums

Moment = dict[str, Tensor]


def sums_first(rule: object, shard: Shard) -> bool:
    """Returns whether a rule yields sums before it writes: for matrices, whose v needs totals."""
    return shard.is_matrix


def state_spec(shard: Shard) -> dict[str, Part]:
    """Declares a rank's part of the statistics."""
    if not shard.is_matrix:
        return {"full": Part.like(shard)}
    return {"row": Part.whole(shard.mats, shard.rows), "col": Part.whole(shard.mats, shard.cols)}


def divide_(
    x: ops.Readable,
    v: Moment,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    shard: Shard,
    clip: float = math.inf,
) -> ops.Quotient:
    """Advances a matrix's v by ``sums``; returns x / sqrt(v), which is evaluated block by block.

    ``sums`` are row and column sums of x². If there is a third tensor, from
    ``weighted_square_sums``, ``clip`` bounds the RMS.
    """
    factors = ops.factors_(v["row"], v["col"], sums, eps, beta, clip, shard)
    return ops.Quotient(x, *factors)


def normalize(
    g: ops.Gradient, v: Moment, eps: float, beta: float, clip: float, shard: Shard, *more: Tensor
) -> Generator[Sums, Sums, tuple[ops.Readable, Sums]]:
    """Updates ``v`` with g; returns u = g / sqrt(v), with its RMS bounded by ``clip``.

    The first round also sums the partial sums ``more``, and their totals are returned after u.
    Whole rows (``Shard.holds_rows``) and vectors take one round, other rows two. The new statistic
    of a whole row is known before the reduction, and

        sum of u² = mean(row) · sum over columns (1 / col · sum over rows (g² / row)).

    The inner sums, one for each column, are reduced together with the statistics. AdaLomo,
    Adafactor and CAME share this function.
    """
    if shard.is_matrix and shard.holds_rows:
        mine = ops.weighted_square_sums(g, v["row"], eps, beta, shard, g)
        row, col, weighted, *totals = yield (*mine, *more)
        return divide_(g, v, (row, col, weighted), eps, beta, shard, clip), tuple(totals)
    u: ops.Readable
    if shard.is_matrix:
        row, col, *totals = yield (*ops.row_col_square_sums(g, shard, g), *more)
        u = divide_(g, v, (row, col), eps, beta, shard)
        (u_sq,) = yield (ops.square_sum(u, shard, g),)
    else:
        ops.square_lerp_(v["full"], g, eps, 1 - beta, shard)
        u = ops.RunQuotient(g, v["full"])
        u_sq, *totals = yield (ops.square_sum(u, shard, g), *more)
    return ops.times(u, (clip / shard.rms(u_sq)).clamp(max=1)), tuple(totals)
