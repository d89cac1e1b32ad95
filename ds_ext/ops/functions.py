"""The functions that rules call: each runs the pass of its name over a run, or over a batch.

``shard`` is the geometry: a ``Shard``, or a ``Batch`` of many parameters. In a batch, ``Runs``
replace each tensor below, each number may be a vector [n], and the sums of all parameters are
concatenated. Inputs are tensors and the lazy expressions of ``expressions`` and ``moments``.
``like`` is a gradient, which gives the device and the dtype of results even if the run is empty.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ds_ext.ops import block_sizes
from ds_ext.ops.batch import Batch
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.expressions import (
    Gradient,
    Number,
    Quotient,
    Readable,
    Writable,
    accumulator,
    part,
    read,
    source_of,
    storage_of,
)
from ds_ext.ops.shard import Block, Shard

Geometry: TypeAlias = Shard | Batch


# Finds the passes over the run of one parameter, by its geometry, a tensor of its device and dtype
# (None: plain torch reads it), and the element from which its random bits count (None: the start of
# the shard).
PassesOfRun: TypeAlias = Callable[[Shard, Gradient | None, int | None], Reference]
_passes_of_run: PassesOfRun


def use(passes_of_run: PassesOfRun) -> None:
    """Sets how passes over the run of one parameter are found. ``ds_ext.optimizer`` calls this."""
    global _passes_of_run
    _passes_of_run = passes_of_run


def passes_over(shard: Geometry, like: Gradient | None) -> Reference:
    """Returns the passes over runs with the device and dtype of ``like``."""
    return shard.passes if isinstance(shard, Batch) else _passes_of_run(shard, like, None)


def passes_writing(shard: Geometry, x: Writable) -> Reference:
    """Returns the passes that write ``x``; plain torch if no table can."""
    if isinstance(shard, Batch):
        return shard.passes
    stored = storage_of(x)
    if stored is None:
        return _passes_of_run(shard, None, None)
    assert isinstance(stored.run, Tensor), "the weights of a batch belong to its ``Batch``"
    return _passes_of_run(shard, stored.run, stored.start)


def square_sum(x: Readable, shard: Geometry, like: Gradient) -> Tensor:
    """Returns the sum of the squares of a run, [].

    Example: ``(total,) = yield (ops.square_sum(g, shard, g),)``
    """
    return passes_over(shard, like).square_sums((x,), like)[0]


def square_sums(runs: Sequence[Readable], shard: Geometry, like: Gradient) -> tuple[Tensor, ...]:
    """Returns the sums of the squares of several runs, [] each; reads shared inputs once.

    Example: ``p_sq, g_sq = yield ops.square_sums((p, g), shard, g)``
    """
    return tuple(passes_over(shard, like).square_sums(runs, like))


def row_col_square_sums(x: Readable, shard: Geometry, like: Gradient) -> tuple[Tensor, Tensor]:
    """Returns sums of the squares of a run over rows and columns, [mats, rows], [mats, cols].

    Rows and columns outside the run are 0, so summing over ranks gives the sums of the matrix.

    Example: ``row, col = yield ops.row_col_square_sums(g, shard, g)``
    """
    return passes_over(shard, like).row_col_square_sums(x, like)


def weighted_square_sums(
    x: Readable, before: Tensor, eps: float, beta: float, shard: Geometry, like: Gradient
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``row_col_square_sums``, and column sums of squares divided by their row's v.

    The divisor is the new statistic, beta · ``before`` + (1 − beta) · mean(x² + eps). It is known
    as soon as the row is read, because runs hold whole rows.

    Args:
        x: the run.
        before: row statistics before the step, [mats, rows].
        eps: added to squares.
        beta: the weight of the old statistic.
        shard: the geometry.
        like: a gradient.

    Returns:
        [mats, rows], [mats, cols], [mats, cols].
    """
    return passes_over(shard, like).weighted_square_sums(x, before, eps, beta, like)


def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Geometry,
) -> tuple[Tensor, Tensor]:
    """v ← beta · v + (1 − beta) · mean(x² + eps) for the statistics ``row`` and ``col``.

    v is estimated as row · col / mean(row). An empty matrix has sums of 0.

    Args:
        row: row statistics, [mats, rows], written.
        col: column statistics, [mats, cols], written.
        sums: of x², over all ranks. With the three sums of ``weighted_square_sums``, the factors
            limit RMS(x / sqrt(v)) to ``clip``.
        eps: added to squares.
        beta: the weight of the old statistics.
        clip: the limit.
        shard: the geometry.

    Returns:
        Factors of 1 / sqrt(v), [mats, rows, 1] and [mats, 1, cols].
    """
    return passes_over(shard, row).factors_(row, col, sums, eps, beta, clip)


def lerp_(m: Writable, x: Readable, weight: float, shard: Geometry) -> None:
    """m ← m + weight · (x − m), for a run.

    Example: ``ops.lerp_(s["m"], g, 1 - 0.9, shard)``
    """
    passes_writing(shard, m).lerp_(m, x, weight)


def square_lerp_(v: Tensor, x: Readable, eps: float, weight: float, shard: Geometry) -> None:
    """v ← v + weight · (x² + eps − v), for a run.

    Example: ``ops.square_lerp_(s["v"], g, 0.0, 1 - 0.999, shard)``
    """
    passes_over(shard, v).square_lerp_(v, x, eps, weight)


def apply_(
    p: Writable, u: Readable, shard: Geometry, *, lr: Number, weight_decay: Number = 0.0
) -> None:
    """p ← p · (1 − lr · weight_decay) − lr · u, for a run of weights.

    It is computed as p − lr · (u + weight_decay · p), because the factor 1 − lr · weight_decay
    would have the same rounding error at every step.

    Example: ``ops.apply_(p, s["m"], shard, lr=0.01, weight_decay=0.1)``
    """
    passes_writing(shard, p).apply_(p, u, lr, weight_decay)


def unit_quotient(x: Readable, shard: Geometry, like: Gradient) -> Quotient:
    """Returns x as a quotient whose factors are all 1."""
    return passes_over(shard, like).unit_quotient(x, like)


def normalize_rows(x: Quotient, sums: Tensor, least: Number, shard: Geometry) -> Quotient:
    """Returns x with rows of norm √cols. Only the factors change; the matrix is not copied.

    Args:
        x: [mats, rows, cols].
        sums: sums of its squares over each row, summed over all ranks, [mats, rows].
        least: the smallest norm that rows are divided by.
        shard: the geometry.
    """
    return passes_over(shard, sums).normalize_rows(x, sums, least)


def normalize_columns(x: Quotient, sums: Tensor, least: Number, shard: Geometry) -> Quotient:
    """Returns x with columns of norm √rows: ``normalize_rows`` by columns."""
    return passes_over(shard, sums).normalize_columns(x, sums, least)


def normalize_whole_rows(
    x: Quotient, least: Number, shard: Geometry, like: Gradient
) -> tuple[Quotient, Tensor]:
    """Returns x as ``normalize_rows`` does, and the column sums of its squares, [mats, cols].

    One pass computes both: a row's norm is known as soon as the row is read, because the run has
    whole rows. Factors of other ranks' rows have no meaning, and the sums only include the run.
    """
    return passes_over(shard, like).normalize_whole_rows(x, least, like)


def blocks(shard: Shard, like: Gradient) -> Iterator[Block]:
    """Yields the blocks of a run, for rules that read them directly, as for matrix products.

    On a GPU blocks are larger: see ``block_sizes.SLICE``.

    Example: ``largest = [ops.read(g, b).abs().max() for b in ops.blocks(shard, g)]``
    """
    yield from shard.blocks(block_sizes.product_limit(like.device))


def evaluate(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Returns the values of a run, [len(shard)]; meant for runs much smaller than the parameter.

    Example: ``values = ops.evaluate(g, shard, g)``
    """
    dtype, blocks_of = accumulator(like.dtype), shard.blocks()  # a batch has none, and raises
    if source_of(x) is None:  # only torch can read it
        values = torch.empty(len(shard), dtype=dtype, device=like.device)
        for b in blocks_of:
            part(values, b).copy_(read(x, b))
        return values
    values = torch.zeros(len(shard), dtype=dtype, device=like.device)
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
