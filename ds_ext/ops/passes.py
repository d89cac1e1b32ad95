"""The passes over memory that rules are made of, in plain torch: the specification of each.

A pass walks a rank's run in blocks of at most ``shard.BLOCK`` elements, so an update that is
written as if it were a tensor (``Quotient``, ``AdamStep``) costs some blocks of scratch memory.
What passes read, and what they write, is of ``lazy`` and ``momenta``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ds_ext.ops import batched, scratch, small
from ds_ext.ops.batch import Batch, Runs
from ds_ext.ops.lazy import (
    Extended,
    Gradient,
    Quotient,
    Readable,
    Run,
    RunQuotient,
    Scaled,
    Sum,
    Writable,
    WritableRun,
    accumulator,
    flat,
    is_part,
    part,
    plus,
    read,
    room,
    times,
    write_,
)
from ds_ext.ops.momenta import AdamStep, Residual, RootQuotient, SignStep, advance_
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.triton import launches

__all__ = [
    "AdamStep",
    "Batch",
    "Extended",
    "Gradient",
    "Quotient",
    "Readable",
    "Residual",
    "RootQuotient",
    "Run",
    "RunQuotient",
    "Runs",
    "Scaled",
    "SignStep",
    "Sum",
    "Writable",
    "WritableRun",
    "accumulator",
    "advance_",
    "advance_numbers_",
    "apply_",
    "blocks",
    "count_beyond",
    "evaluate",
    "factors_",
    "flat",
    "is_part",
    "largest",
    "lerp_",
    "matrix_square_sums",
    "own_run",
    "pad",
    "part",
    "plus",
    "read",
    "room",
    "square_lerp_",
    "square_sum",
    "square_sums",
    "square_sums_of",
    "squared",
    "squares",
    "times",
    "weighed_square_sums",
    "write_",
]


def square_sum(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Sum of the squares of a run -> []. ``like`` gives device and dtype where the run is empty."""
    (total,) = square_sums((x,), shard, like)
    return cast(Tensor, total)


@batched.on_batches(batched.square_sums)
@launches.tried(launches.square_sums)
def square_sums(runs: Sequence[Readable], shard: Shard, like: Gradient) -> list[Tensor]:
    """Sums of the squares of several runs, in one pass over what they have in common -> [] each."""
    dtype = accumulator(like.dtype)
    totals = [torch.zeros((), dtype=dtype, device=like.device) for _ in runs]
    for b in scratch.blocks(shard):
        for x, total in zip(runs, totals, strict=True):
            v = read(x, b).reshape(-1)
            total += torch.dot(v, v)
    return totals


def square_sums_of(runs: Sequence[Tensor]) -> Tensor:
    """Sums of the squares of flat tensors on one device, at least one -> [n]."""
    if batched.takes(runs):
        return batched.square_sums_of(runs)
    return torch.stack([square_sum(x, Shard.whole((len(x),)), x) for x in runs])


def largest(runs: Sequence[Tensor]) -> Tensor:
    """The largest magnitudes of flat tensors on one device -> [n]; 0 of no elements.

    It is inf or NaN where an element is.
    """
    if batched.finds_largest(runs):
        return batched.largest(runs)
    found = []
    for x in runs:
        low, high = torch.aminmax(x) if len(x) else (x.new_zeros(()), x.new_zeros(()))
        found.append(torch.maximum(high, -low).to(accumulator(x.dtype)))
    return torch.stack(found)


def count_beyond(x: Readable, bound: float, shard: Shard, like: Gradient) -> Tensor:
    """How many elements of a run lie outside ± ``bound`` -> []."""
    launches.launch()
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for b in scratch.blocks(shard):
        total += (read(x, b).abs() > bound).sum()
    return total


@batched.on_batches(batched.matrix_square_sums)
@launches.tried(launches.matrix_square_sums)
def matrix_square_sums(x: Readable, shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Sums of the squares of a run over each row and column -> [mats, rows], [mats, cols].

    Rows and columns outside the run are 0, so that summing over ranks gives the whole matrix's.
    """
    row, col = _zeros(shard, like)
    ones = torch.ones(max(shard.rows, shard.cols), dtype=row.dtype, device=row.device)
    for b in scratch.blocks(shard):
        if small.holds_whole(b, shard.mats, shard.rows, shard.cols):
            planes = small.square_planes(read(x, b))
            small.write_row_sums(row[b.mats], planes)
            small.write_col_sums(col[b.mats], planes)
            continue
        square = squared(x, b)
        _, rows, cols = b.shape
        # products with ones are faster by far than sums over a dimension
        row[b.mats, b.rows].add_(square @ ones[:cols])
        col[b.mats, b.cols].add_(ones[:rows] @ square)
    return row, col


@batched.on_batches(batched.weighed_square_sums)
@launches.tried(launches.weighed_square_sums)
def weighed_square_sums(
    x: Readable, before: Tensor, eps: float, beta: float, shard: Shard, like: Gradient
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the sums over each column of squares divided by a number of their row.

    That is the row's new statistic, beta · ``before`` + (1 − beta) · mean(x² + eps), which is known
    as soon as the row is read where runs hold whole rows. -> [mats, rows], [mats, cols],
    [mats, cols]
    """
    assert shard.holds_rows
    row, col = _zeros(shard, like)
    both = col.new_zeros(2, shard.mats, shard.cols).transpose(0, 1)
    ones, share = col.new_ones(shard.cols), (1 - beta) / shard.cols
    for b in scratch.blocks(shard):
        old = torch.mul(before[b.mats, b.rows], beta, out=scratch.like(before[b.mats, b.rows]))
        old += (1 - beta) * eps
        if small.holds_whole(b, shard.mats, shard.rows, shard.cols):
            planes, sums = small.square_planes(read(x, b)), row[b.mats]
            small.write_row_sums(sums, planes)
            small.write_col_sums(both[b.mats, 0], planes)
            small.scale_rows_(planes, old.add_(sums, alpha=share).reciprocal_())
            small.write_col_sums(both[b.mats, 1], planes)
            continue
        square = squared(x, b)
        mats, rows, _ = b.shape
        sums = torch.matmul(square, ones, out=row[b.mats, b.rows])
        weights = col.new_ones(mats, 2, rows)
        torch.add(old, sums, alpha=share, out=weights[:, 1]).reciprocal_()
        both[b.mats].baddbmm_(weights, square)
    return row, both[:, 0], both[:, 1]


@batched.on_batches(batched.factors_)
@launches.tried(launches.factors_)
def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> tuple[Tensor, Tensor]:
    """v ← beta · v + (1 − beta) · mean(x² + eps) for a matrix's statistics ``row`` and ``col``,
    ``sums`` being those of x² -> factors [mats, rows, 1], [mats, 1, cols] of 1 / sqrt(v).

    The estimate of v is row · col / mean(row). With ``weighed_square_sums`` as a third of the
    sums, the factors are such that RMS(x / sqrt(v)) is ``clip`` at most.
    """
    by_col = torch.empty_like(col)
    by_row = torch.ones_like(row[:1]) if shard.rows == 1 else torch.empty_like(row)
    u_sq = row.new_zeros(())
    for mats in scratch.parts(shard.mats, max(shard.rows, shard.cols)):
        mean = _advance_mean_(row[mats], sums[0][mats], shard.cols, eps, 1 - beta)
        _advance_mean_(col[mats], sums[1][mats], shard.rows, eps, 1 - beta)
        torch.rsqrt(col[mats], out=by_col[mats])
        if shard.rows > 1:
            torch.div(row[mats], mean, out=by_row[mats]).rsqrt_()
        if len(sums) > 2:
            weighed = torch.div(sums[2][mats], col[mats], out=scratch.like(col[mats]))
            u_sq += torch.dot(mean.view(-1), small.sums(weighed))
    if len(sums) > 2:
        by_row *= (clip / shard.rms(u_sq)).clamp(max=1)
    return by_row.expand_as(row).unsqueeze(-1), by_col.unsqueeze(-2)


def _advance_mean_(v: Tensor, sums: Tensor, of: int, eps: float, weight: float) -> Tensor:
    """v ← v + weight · (sums / of + eps − v), of many matrices [mats, n] -> its means [mats, 1]."""
    v.lerp_(torch.div(sums, of, out=scratch.like(v)).add_(eps), weight)
    return v if v.shape[1] == 1 else (small.sums(v) / v.shape[1]).unsqueeze(1)


def _zeros(shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Sums over rows and over columns of nothing."""
    dtype = accumulator(like.dtype)
    row = torch.zeros(shard.mats, shard.rows, dtype=dtype, device=like.device)
    return row, torch.zeros(shard.mats, shard.cols, dtype=dtype, device=like.device)


@batched.on_batches(batched.squares)
@launches.tried(launches.squares_)
def squares(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """The squares of a run where it lies in the whole parameter, 0 elsewhere -> [numel]."""
    make = torch.empty if len(shard) == shard.numel else torch.zeros
    out = make(shard.numel, dtype=accumulator(like.dtype), device=like.device)
    own = out[shard.start : shard.stop]
    for b in scratch.blocks(shard):
        values = read(x, b)
        torch.mul(values, values, out=part(own, b))
    return out


@batched.on_batches(batched.advance_numbers_)
def advance_numbers_(
    row: Tensor, col: Tensor, squares: Tensor, eps: float, beta: float, shard: Shard
) -> Tensor:
    """v ← beta · v + (1 − beta) · (x² + eps), of matrices of one element, whose statistics ``row``
    and ``col`` are both v, [numel, 1] -> the sum of x² / v, [].
    """
    row, col = row.view(-1), col.view(-1)
    total = row.new_zeros(())
    for at in scratch.parts(len(row), 1):
        v, x_sq = row[at], squares[at]
        new = torch.add(x_sq, eps, out=scratch.like(v))
        col[at].copy_(v.lerp_(new, 1 - beta))
        total += torch.dot(x_sq, torch.reciprocal(v, out=new))
    return total


@batched.on_batches(batched.own_run)
def own_run(v: Tensor, shard: Shard) -> Tensor:
    """What of a number for each element of the whole parameter is of the run, [len(shard)]."""
    return v.view(-1)[shard.start : shard.stop]


def squared(x: Readable, b: Block) -> Tensor:
    """The squares of a block, which are the caller's."""
    values = read(x, b)
    return torch.mul(values, values, out=room(values, x))


@batched.on_batches(batched.lerp_)
@launches.tried(launches.lerp_)
def lerp_(m: Tensor, x: Readable, weight: float, shard: Shard) -> None:
    """m ← m + weight · (x − m), for a run."""
    for b in scratch.blocks(shard):
        advance_(m, b, read(x, b), weight)


@batched.on_batches(batched.square_lerp_)
@launches.tried(launches.square_lerp_)
def square_lerp_(v: Tensor, x: Readable, eps: float, weight: float, shard: Shard) -> None:
    """v ← v + weight · (x² + eps − v), for a run."""
    for b in scratch.blocks(shard):
        advance_(v, b, squared(x, b).add_(eps), weight)


@batched.on_batches(batched.apply_)
@launches.tried(launches.apply_)
def apply_(
    p: Writable,
    u: Readable,
    shard: Shard,
    *,
    lr: Tensor | float,
    weight_decay: Tensor | float = 0.0,
) -> None:
    """p ← p · (1 − lr · weight_decay) − lr · u, for a run of weights.

    The change is added up before it meets p, as p − lr · (u + weight_decay · p): 1 − lr ·
    weight_decay would round alike at every step.
    """
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0
    if isinstance(lr, Tensor):
        u, weight_decay, lr = times(u, lr), lr * weight_decay, 1.0
    if isinstance(u, Tensor) and not decays and getattr(p, "dtype", None) == u.dtype:
        _subtract_(p, u, lr)  # in one pass
        return
    for b in scratch.blocks(shard, p.limit if isinstance(p, Extended) else None):
        old = read(p, b)
        if decays:
            change = torch.mul(old, weight_decay, out=scratch.like(old)).add_(read(u, b))
            _subtract_(old, change, lr)
        elif isinstance(u, Quotient):
            u.subtract_from_(old, b, lr)
        else:
            _subtract_(old, read(u, b), lr)
        if not is_part(old, p):
            write_(p, b, old)


def _subtract_(p: Any, u: Tensor, lr: float) -> None:
    """p ← p − lr · u, in whatever way p does that: with the same bits in one piece and in blocks.

    ``sub_`` would round lr to 16 bits where p has 16, and the product not by itself.
    """
    p.addcmul_(u, torch.ones((), dtype=u.dtype, device=u.device), value=-lr)


def blocks(shard: Shard, like: Gradient) -> Iterator[Block]:
    """The blocks of a run, for a rule that reads them itself, as products of matrices need it.

    What passes have written before is there. On a GPU blocks are larger: see ``scratch.SLICE``.
    """
    launches.launch()
    yield from scratch.blocks(shard, scratch.product_limit(like.device))


def evaluate(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """The values of a run, [len(shard)], as a tensor: for what is small beside the parameter."""
    launches.launch()
    values = torch.empty(len(shard), dtype=accumulator(like.dtype), device=like.device)
    for b in scratch.blocks(shard):
        write_(values, b, read(x, b))
    return values


def pad(x: Tensor, part: slice, like: Tensor) -> Tensor:
    """Zeros shaped as ``like`` with ``x`` as the elements ``part``, counted flat."""
    whole = torch.zeros_like(like)
    whole.view(-1)[part] = x
    return whole
