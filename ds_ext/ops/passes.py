"""The passes over memory that optimizers consist of: each is a value and a function.

The value names the inputs and outputs. ``ops.executors`` make the pass: plain torch, which is the
specification (``executors.reference``), native code or Triton kernels. ``shard`` is the geometry: a
``Shard``, or a ``Batch`` of many parameters. In a batch, ``Runs`` replace each tensor below, each
number may be a vector [n], and the sums of all parameters are concatenated.

The inputs are tensors and the lazy expressions of ``expressions`` and ``moments``.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ds_ext.ops import dispatch, scratch
from ds_ext.ops.expressions import (
    Gradient,
    Number,
    Quotient,
    Readable,
    Writable,
    accumulator,
    read,
)
from ds_ext.ops.shard import Block, Shard


class SquareSums(NamedTuple):
    """Sums of the squares of several runs -> [] each."""

    runs: Sequence[Readable]
    like: Gradient  # the gradient: gives the device and the dtype, even if the runs are empty


class FlatSquareSums(NamedTuple):
    """Sums of the squares of flat tensors on one device -> [n]."""

    runs: Sequence[Tensor]


class Largest(NamedTuple):
    """The largest magnitudes of flat tensors on one device -> [n]."""

    runs: Sequence[Tensor]


class RowColSums(NamedTuple):
    """Sums of the squares of a run over each row and column -> [mats, rows], [mats, cols]."""

    x: Readable
    like: Gradient


class WeightedRowColSums(NamedTuple):
    """``RowColSums``, and column sums of squares divided by their row's new statistic."""

    x: Readable
    before: Tensor  # [mats, rows], the row statistics before the step
    eps: float
    beta: float
    like: Gradient


class Factors(NamedTuple):
    """Advances row and column statistics -> [mats, rows, 1], [mats, 1, cols] of 1 / sqrt(v)."""

    row: Tensor  # [mats, rows], written
    col: Tensor  # [mats, cols], written
    sums: tuple[Tensor, ...]  # ``RowColSums`` or ``WeightedRowColSums``, summed over all ranks
    eps: float
    beta: float
    clip: float


class ScatteredSquares(NamedTuple):
    """The squares of a run at its place in the whole parameter, 0 elsewhere -> [numel]."""

    x: Readable
    like: Gradient


class Advance1x1(NamedTuple):
    """Advances the statistics of matrices of one element -> the sum of x² / v, []."""

    row: Tensor  # [numel, 1], written
    col: Tensor  # [numel, 1], written
    squares: Tensor  # [numel]
    eps: float
    beta: float


class OwnRun(NamedTuple):
    """The run's part of a vector over the whole parameter -> [len(shard)]."""

    v: Tensor


class Lerp(NamedTuple):
    """m ← m + weight · (x − m)."""

    m: Writable  # written
    x: Readable
    weight: float


class SquareLerp(NamedTuple):
    """v ← v + weight · (x² + eps − v)."""

    v: Tensor  # written
    x: Readable
    eps: float
    weight: float


class Apply(NamedTuple):
    """p ← p · (1 − lr · weight_decay) − lr · u."""

    p: Writable
    u: Readable
    lr: Number
    weight_decay: Number


class UnitQuotient(NamedTuple):
    """x as a ``Quotient`` whose factors are all 1."""

    x: Readable
    like: Gradient


class NormalizeRows(NamedTuple):
    """``x`` with rows of norm √cols."""

    x: Quotient
    sums: Tensor  # [mats, rows], of its squares, summed over all ranks
    least: Number


class NormalizeColumns(NamedTuple):
    """``x`` with columns of norm √rows."""

    x: Quotient
    sums: Tensor  # [mats, cols], of its squares, summed over all ranks
    least: Number


class NormalizeWholeRows(NamedTuple):
    """``NormalizeRows`` for runs of whole rows; also returns column sums of the new squares."""

    x: Quotient
    least: Number
    like: Gradient


def square_sum(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Returns the sum of the squares of a run, [].

    Args:
        x: the run.
        shard: its geometry.
        like: gives the device and dtype, even if the run is empty.
    """
    (total,) = square_sums((x,), shard, like)
    return total


def square_sums(runs: Sequence[Readable], shard: Shard, like: Gradient) -> tuple[Tensor, ...]:
    """Returns the sums of the squares of several runs, [] each; reads shared inputs once."""
    return tuple(dispatch.execute(SquareSums(runs, like), shard))


def square_sums_of(runs: Sequence[Tensor]) -> Tensor:
    """Returns the sums of the squares of flat tensors on one device, at least one, [n]."""
    return cast(Tensor, dispatch.execute(FlatSquareSums(runs), None))


def largest(runs: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitudes of flat tensors on one device, [n]; 0 for empty tensors.

    A magnitude is inf or NaN if an element is inf or NaN.
    """
    return cast(Tensor, dispatch.execute(Largest(runs), None))


def count_beyond(x: Readable, bound: float, shard: Shard, like: Gradient) -> Tensor:
    """Returns how many elements of a run lie outside ± ``bound``, []."""
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for b in scratch.blocks(shard):
        total += (read(x, b).abs() > bound).sum()
    return total


def row_col_square_sums(x: Readable, shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Returns sums of the squares of a run over rows and columns, [mats, rows], [mats, cols].

    Rows and columns outside the run are 0, so summing over ranks gives the sums of the matrix.
    """
    return cast(tuple[Tensor, Tensor], dispatch.execute(RowColSums(x, like), shard))


def weighted_square_sums(
    x: Readable, before: Tensor, eps: float, beta: float, shard: Shard, like: Gradient
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``row_col_square_sums``, and column sums of squares divided by their row's statistic.

    The divisor is the new statistic, beta · ``before`` + (1 − beta) · mean(x² + eps). It is known
    as soon as the row is read, because runs hold whole rows.

    Returns:
        [mats, rows], [mats, cols], [mats, cols].
    """
    asked = WeightedRowColSums(x, before, eps, beta, like)
    return cast(tuple[Tensor, Tensor, Tensor], dispatch.execute(asked, shard))


def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> tuple[Tensor, Tensor]:
    """v ← beta · v + (1 − beta) · mean(x² + eps) for the statistics ``row`` and ``col``.

    ``sums`` are the sums of x². Returns factors of 1 / sqrt(v), [mats, rows, 1] and
    [mats, 1, cols], where v is estimated as row · col / mean(row). With the three sums of
    ``weighted_square_sums``, the factors limit RMS(x / sqrt(v)) to ``clip``.
    """
    asked = Factors(row, col, sums, eps, beta, clip)
    return cast(tuple[Tensor, Tensor], dispatch.execute(asked, shard))


def scattered_squares(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Returns the squares of a run at its place in the whole parameter, 0 elsewhere, [numel]."""
    return cast(Tensor, dispatch.execute(ScatteredSquares(x, like), shard))


def advance_1x1_(
    row: Tensor, col: Tensor, squares: Tensor, eps: float, beta: float, shard: Shard
) -> Tensor:
    """v ← beta · v + (1 − beta) · (x² + eps) for 1 x 1 matrices; returns the sum of x² / v, [].

    The statistics ``row`` and ``col``, [numel, 1], both hold v.
    """
    return cast(Tensor, dispatch.execute(Advance1x1(row, col, squares, eps, beta), shard))


def own_run(v: Tensor, shard: Shard) -> Tensor:
    """Returns the run's part of ``v``, a vector over the whole parameter, [len(shard)]."""
    return cast(Tensor, dispatch.execute(OwnRun(v), shard))


def lerp_(m: Writable, x: Readable, weight: float, shard: Shard) -> None:
    """m ← m + weight · (x − m), for a run."""
    dispatch.execute(Lerp(m, x, weight), shard)


def square_lerp_(v: Tensor, x: Readable, eps: float, weight: float, shard: Shard) -> None:
    """v ← v + weight · (x² + eps − v), for a run."""
    dispatch.execute(SquareLerp(v, x, eps, weight), shard)


def apply_(
    p: Writable, u: Readable, shard: Shard, *, lr: Number, weight_decay: Number = 0.0
) -> None:
    """p ← p · (1 − lr · weight_decay) − lr · u, for a run of weights.

    It is computed as p − lr · (u + weight_decay · p), because the factor 1 − lr · weight_decay
    would have the same rounding error at every step.
    """
    dispatch.execute(Apply(p, u, lr, weight_decay), shard)


def unit_quotient(x: Readable, shard: Shard, like: Gradient) -> Quotient:
    """Returns x as a quotient whose factors are all 1."""
    return cast(Quotient, dispatch.execute(UnitQuotient(x, like), shard))


def normalize_rows(x: Quotient, sums: Tensor, least: Number, shard: Shard) -> Quotient:
    """Returns x with rows of norm √cols. Only the factors change; the matrix is not copied.

    Args:
        x: [mats, rows, cols].
        sums: sums of its squares over each row, summed over all ranks, [mats, rows].
        least: the smallest norm that rows are divided by.
        shard: the geometry of the run.
    """
    return cast(Quotient, dispatch.execute(NormalizeRows(x, sums, least), shard))


def normalize_columns(x: Quotient, sums: Tensor, least: Number, shard: Shard) -> Quotient:
    """Returns x with columns of norm √rows: ``normalize_rows`` for columns, sums [mats, cols]."""
    return cast(Quotient, dispatch.execute(NormalizeColumns(x, sums, least), shard))


def normalize_whole_rows(
    x: Quotient, least: Number, shard: Shard, like: Gradient
) -> tuple[Quotient, Tensor]:
    """Returns x as ``normalize_rows`` does, and the column sums of its new squares, [mats, cols].

    One pass computes both: a row's norm is known as soon as the row is read, because the run has
    whole rows. The new row factors include ``x.scale``. Factors of other ranks' rows are 0, and the
    sums only include the run.
    """
    asked = NormalizeWholeRows(x, least, like)
    return cast(tuple[Quotient, Tensor], dispatch.execute(asked, shard))


def blocks(shard: Shard, like: Gradient) -> Iterator[Block]:
    """Yields the blocks of a run, for rules that read them directly, as for matrix products.

    On a GPU blocks are larger: see ``scratch.SLICE``.
    """
    yield from scratch.blocks(shard, scratch.product_limit(like.device))


def evaluate(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Returns the values of a run, [len(shard)]; meant for runs much smaller than the parameter."""
    values = torch.zeros(len(shard), dtype=accumulator(like.dtype), device=like.device)
    lerp_(values, x, 1.0, shard)  # exact from 0, by the fastest executor
    return values


def pad(x: Tensor, part: slice, like: Tensor) -> Tensor:
    """Returns zeros of the shape of ``like``, with ``x`` as its flat elements ``part``.

    If these are all elements, it returns a view of ``x``.
    """
    if part == slice(0, like.numel()):
        return x.view(like.shape)
    whole = torch.zeros_like(like)
    whole.view(-1)[part] = x
    return whole
