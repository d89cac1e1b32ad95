"""The second moment of a parameter: row and column statistics of a matrix, or one per element.

``{"row": [mats, rows], "col": [mats, cols]}`` is replicated on all ranks: it is changed only by
sums over the whole parameter, so it is the same whatever the number of ranks. A parameter with
fewer than two dimensions has ``{"full": run}``, which is sharded like the parameter and needs no
sums. The estimate of a matrix's second moment is row · col / mean(row); mean(row) equals
mean(col), so it needs no reduction of its own. Source: Shazeer and Stern, arXiv 1804.04235, sec. 3.
"""

import math
from collections.abc import Generator
from typing import TypeAlias

from torch import Tensor

from ds_ext import ops
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part
from ds_ext.rules.base import Sums

Moment = dict[str, Tensor]
Update: TypeAlias = ops.Quotient | ops.RunQuotient
# An update, the sum of its squares over all ranks, and the totals that travelled along.
Unbounded: TypeAlias = Generator[Sums, Sums, tuple[Update, Tensor, Sums]]


def sums_first(rule: object, shard: Shard) -> bool:
    """Whether a rule yields a matrix's sums before it writes: statistics advance by totals."""
    return shard.is_matrix


def state_spec(shard: Shard) -> dict[str, Part]:
    """What a rank keeps of the statistics."""
    if not shard.is_matrix:
        return {"full": Part.like(shard)}
    return {
        "row": Part.whole(shard.mats, shard.rows),
        "col": Part.whole(shard.mats, shard.cols),
    }


def sums(x: ops.Readable, shard: Shard, like: ops.Gradient) -> tuple[Tensor, ...]:
    """What the ranks have to add up before ``divide_``: row and column sums of x².

    Of matrices of one element they are the same, x², and are added up once.
    """
    if not shard.is_matrix:
        return ()
    return (
        (ops.scattered_squares(x, shard, like),)
        if shard.is_1x1
        else ops.row_col_square_sums(x, shard, like)
    )


def divide_(
    x: ops.Readable,
    v: Moment,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    shard: Shard,
    clip: float = math.inf,
) -> Update:
    """Advances a matrix's v by ``sums`` and gives x / sqrt(v), to be evaluated block by block.

    A third of the sums is ``weighted_square_sums``: the RMS of the quotient is bounded by ``clip``.
    """
    if shard.is_1x1:
        return _divide_numbers_(x, v, sums, eps, beta, shard)[0]
    factors = ops.factors_(v["row"], v["col"], sums, eps, beta, clip, shard)
    return ops.Quotient(x, *factors)


def _divide_numbers_(
    x: ops.Readable, v: Moment, sums: Sums, eps: float, beta: float, shard: Shard
) -> tuple[ops.RunQuotient, Tensor]:
    """The same of matrices of one element, and the sum of the squares of the quotient, []."""
    u_sq = ops.advance_1x1_(v["row"], v["col"], sums[0], eps, beta, shard)
    return ops.RunQuotient(x, ops.own_run(v["row"], shard)), u_sq


def normalize(
    g: ops.Gradient, v: Moment, eps: float, beta: float, clip: float, shard: Shard, *more: Tensor
) -> Generator[Sums, Sums, tuple[Update, Sums]]:
    """Updates ``v`` by g and gives u = g / sqrt(v), its RMS bounded by ``clip``.

    ``more`` are further partial sums that travel with the first round; their totals are returned
    beside u. What AdaLomo, Adafactor and CAME have in common.
    """
    if shard.is_1x1:
        u, u_sq, totals = yield from _normalize_numbers(g, v, eps, beta, shard, *more)
    elif shard.is_matrix and shard.holds_rows:
        return (yield from _normalize_whole_rows(g, v, eps, beta, clip, shard, *more))
    elif shard.is_matrix:
        u, u_sq, totals = yield from _normalize_cut_rows(g, v, eps, beta, shard, *more)
    else:
        u, u_sq, totals = yield from _normalize_vector(g, v, eps, beta, shard, *more)
    return u.times((clip / shard.rms(u_sq)).clamp(max=1)), totals


def _normalize_vector(
    g: ops.Gradient, v: Moment, eps: float, beta: float, shard: Shard, *more: Tensor
) -> Unbounded:
    """u of a vector, whose v is a run like g; one round, for the sum of u²."""
    ops.square_lerp_(v["full"], g, eps, 1 - beta, shard)
    u = ops.RunQuotient(g, v["full"])
    u_sq, *totals = yield (ops.square_sum(u, shard, g), *more)
    return u, u_sq, tuple(totals)


def _normalize_numbers(
    g: ops.Gradient, v: Moment, eps: float, beta: float, shard: Shard, *more: Tensor
) -> Unbounded:
    """u of matrices of one element, whose v every rank has whole; one round, of g²."""
    square, *totals = yield (*sums(g, shard, g), *more)
    u, u_sq = _divide_numbers_(g, v, (square,), eps, beta, shard)
    return u, u_sq, tuple(totals)


def _normalize_cut_rows(
    g: ops.Gradient, v: Moment, eps: float, beta: float, shard: Shard, *more: Tensor
) -> Unbounded:
    """u of a matrix of whose rows ranks hold parts; two rounds, of statistics and of u²."""
    row, col, *totals = yield (*sums(g, shard, g), *more)
    u = divide_(g, v, (row, col), eps, beta, shard)
    (u_sq,) = yield (ops.square_sum(u, shard, g),)
    return u, u_sq, tuple(totals)


def _normalize_whole_rows(
    g: ops.Gradient, v: Moment, eps: float, beta: float, clip: float, shard: Shard, *more: Tensor
) -> Generator[Sums, Sums, tuple[Update, Sums]]:
    """u, bounded, of a matrix of which ranks hold whole rows; one round.

    A whole row has its new statistic before any sum is reduced, and

        sum of u² = mean(row) · sum over columns (1 / col · sum over rows (g² / row)),

    of which the inner sums, one for each column, travel with the statistics.
    """
    mine = ops.weighted_square_sums(g, v["row"], eps, beta, shard, g)
    row, col, weighted, *totals = yield (*mine, *more)
    return divide_(g, v, (row, col, weighted), eps, beta, shard, clip), tuple(totals)
