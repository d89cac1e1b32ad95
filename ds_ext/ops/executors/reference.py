"""The specification of each pass, in plain torch over the run of one parameter.

A pass reads the run in blocks of at most ``shard.BLOCK`` elements, so a lazy expression needs only
a few blocks of scratch memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops import passes, scratch
from ds_ext.ops.dispatch import Makers
from ds_ext.ops.expressions import (
    Extended,
    Gradient,
    Number,
    Quotient,
    Readable,
    Writable,
    accumulator,
    is_part,
    output_buffer,
    part,
    read,
    times,
    write_,
)
from ds_ext.ops.moments import advance_
from ds_ext.ops.shard import Block, Shard

# The largest factor: zero rows and columns stay zero under repeated scaling, and the product of a
# row's and a column's factor is finite in fp32.
LARGEST = 1e18

_makers = Makers()


class Reference:
    """The executor that makes every pass over the run of one parameter."""

    def run(self, asked: Any, where: Any) -> Any:
        """See ``dispatch.Executor``."""
        if where is None:
            return _makers[type(asked)](*asked)
        return _makers[type(asked)](*asked, where)


@_makers.makes(passes.SquareSums)
def square_sums(runs: Sequence[Readable], like: Gradient, shard: Shard) -> list[Tensor]:
    """Sums of squares of several runs, block by block."""
    dtype = accumulator(like.dtype)
    totals = [torch.zeros((), dtype=dtype, device=like.device) for _ in runs]
    for b in scratch.blocks(shard):
        for x, total in zip(runs, totals, strict=True):
            v = read(x, b).reshape(-1)
            total += torch.dot(v, v)
    return totals


@_makers.makes(passes.FlatSquareSums)
def square_sums_of(runs: Sequence[Tensor]) -> Tensor:
    """Sums of the squares of each tensor."""
    return torch.stack([square_sums([x], x, Shard.whole((len(x),)))[0] for x in runs])


@_makers.makes(passes.Largest)
def largest(runs: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor; 0 for an empty one."""
    found = []
    for x in runs:
        low, high = torch.aminmax(x) if len(x) else (x.new_zeros(()), x.new_zeros(()))
        found.append(torch.maximum(high, -low).to(accumulator(x.dtype)))
    return torch.stack(found)


@_makers.makes(passes.RowColSums)
def row_col_square_sums(x: Readable, like: Gradient, shard: Shard) -> tuple[Tensor, Tensor]:
    """Sums over each row and column, 0 outside the run."""
    row, col = _zeros(shard, like)
    for b in scratch.blocks(shard):
        square = squared(x, b)
        row[b.mats, b.rows] += square.sum(2)
        col[b.mats, b.cols] += square.sum(1)
    return row, col


@_makers.makes(passes.WeightedRowColSums)
def weighted_square_sums(
    x: Readable, before: Tensor, eps: float, beta: float, like: Gradient, shard: Shard
) -> tuple[Tensor, Tensor, Tensor]:
    """Row sums, column sums, and column sums of squares divided by their row's new statistic."""
    assert shard.holds_rows
    row, col = _zeros(shard, like)
    weighted = torch.zeros_like(col)
    for b in scratch.blocks(shard):
        square = squared(x, b)
        sums = square.sum(2)
        row[b.mats, b.rows] = sums
        col[b.mats] += square.sum(1)
        new = before[b.mats, b.rows] * beta + (1 - beta) * (sums / shard.cols + eps)
        weights = new.reciprocal_().clamp_(max=LARGEST**2)  # 0 / 0 is 0
        weighted[b.mats] += square.mul_(weights.unsqueeze(2)).sum(1)
    return row, col, weighted


@_makers.makes(passes.Factors)
def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> tuple[Tensor, Tensor]:
    """Advances the statistics; v is estimated as row · col / mean(row)."""
    by_col = torch.empty_like(col)
    by_row = torch.ones_like(row[:1]) if shard.rows == 1 else torch.empty_like(row)
    u_sq = row.new_zeros(())
    for mats in scratch.parts(shard.mats, max(shard.rows, shard.cols)):
        _advance_mean_(row[mats], sums[0][mats], shard.cols, eps, 1 - beta)
        _advance_mean_(col[mats], sums[1][mats], shard.rows, eps, 1 - beta)
        mean = row[mats].sum(1, keepdim=True) / max(shard.rows, 1)
        by_col[mats] = _inverse_root(col[mats], col[mats])
        if shard.rows > 1:
            by_row[mats] = _inverse_root(row[mats] / mean, row[mats])
        if len(sums) > 2:
            divisor = col[mats].masked_fill(col[mats] == 0, 1)  # of a sum that is 0 too
            u_sq += torch.sum(mean * (sums[2][mats] / divisor))
    if len(sums) > 2:
        by_row *= (clip / shard.rms(u_sq)).clamp(max=1)
    return by_row.expand_as(row).unsqueeze(-1), by_col.unsqueeze(-2)


def _advance_mean_(v: Tensor, sums: Tensor, of: int, eps: float, weight: float) -> None:
    """v ← v + weight · (sums / of + eps − v); an empty matrix has sums of 0."""
    v.lerp_((sums / max(of, 1)).add_(eps), weight)


def _inverse_root(ratio: Tensor, v: Tensor) -> Tensor:
    """1 / sqrt(ratio), at most ``LARGEST``; 0 where the statistic v is 0, as then the input is."""
    return ratio.rsqrt().clamp_(max=LARGEST).masked_fill_(v == 0, 0)


def _zeros(shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Row sums and column sums, all zero."""
    dtype = accumulator(like.dtype)
    row = torch.zeros(shard.mats, shard.rows, dtype=dtype, device=like.device)
    return row, torch.zeros(shard.mats, shard.cols, dtype=dtype, device=like.device)


@_makers.makes(passes.ScatteredSquares)
def scattered_squares(x: Readable, like: Gradient, shard: Shard) -> Tensor:
    """The squares of a run at its place in the whole parameter, 0 elsewhere."""
    make = torch.empty if len(shard) == shard.numel else torch.zeros
    out = make(shard.numel, dtype=accumulator(like.dtype), device=like.device)
    own = out[shard.start : shard.stop]
    for b in scratch.blocks(shard):
        values = read(x, b)
        torch.mul(values, values, out=part(own, b))
    return out


@_makers.makes(passes.Advance1x1)
def advance_1x1_(
    row: Tensor, col: Tensor, squares: Tensor, eps: float, beta: float, shard: Shard
) -> Tensor:
    """Advances ``row`` and ``col``, which both hold v -> the sum of x² / v."""
    row, col = row.view(-1), col.view(-1)
    total = row.new_zeros(())
    for at in scratch.parts(len(row), 1):
        v, x_sq = row[at], squares[at]
        new = torch.add(x_sq, eps, out=scratch.like(v))
        col[at].copy_(v.lerp_(new, 1 - beta))
        total += torch.dot(x_sq, torch.reciprocal(v, out=new).clamp_(max=LARGEST**2))
    return total


@_makers.makes(passes.OwnRun)
def own_run(v: Tensor, shard: Shard) -> Tensor:
    """The run's part of the whole parameter's numbers."""
    return v.view(-1)[shard.start : shard.stop]


def squared(x: Readable, b: Block) -> Tensor:
    """The squares of a block; the caller may overwrite them."""
    values = read(x, b)
    return torch.mul(values, values, out=output_buffer(values, x))


@_makers.makes(passes.Lerp)
def lerp_(m: Tensor, x: Readable, weight: float, shard: Shard) -> None:
    """m ← m + weight · (x − m), for a run."""
    for b in scratch.blocks(shard):
        advance_(m, b, read(x, b), weight)


@_makers.makes(passes.SquareLerp)
def square_lerp_(v: Tensor, x: Readable, eps: float, weight: float, shard: Shard) -> None:
    """v ← v + weight · (x² + eps − v), for a run."""
    for b in scratch.blocks(shard):
        advance_(v, b, squared(x, b).add_(eps), weight)


@_makers.makes(passes.Apply)
def apply_(
    p: Writable,
    u: Readable,
    lr: Tensor | float,
    weight_decay: Tensor | float,
    shard: Shard,
) -> None:
    """p ← p − lr · (u + weight_decay · p)."""
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
    """p ← p − lr · u, with the same bits for the whole run and for its blocks.

    ``sub_`` would round lr to 16 bits if p has 16, and would not round the product separately.
    """
    p.addcmul_(u, torch.ones((), dtype=u.dtype, device=u.device), value=-lr)


@_makers.makes(passes.UnitQuotient)
def unit_quotient(x: Readable, like: Gradient, shard: Shard) -> Quotient:
    """x with factors of 1."""
    dtype = accumulator(like.dtype)
    row = torch.ones(shard.mats, shard.rows, 1, dtype=dtype, device=like.device)
    return Quotient(x, row, row.new_ones(shard.mats, 1, shard.cols))


@_makers.makes(passes.NormalizeRows)
def normalize_rows(x: Quotient, sums: Tensor, least: Number, shard: Shard) -> Quotient:
    """x with the row factors that give rows of norm √cols."""
    return replace(x, row=_normalized(x.row, sums.unsqueeze(-1), shard.cols, least))


@_makers.makes(passes.NormalizeColumns)
def normalize_columns(x: Quotient, sums: Tensor, least: Number, shard: Shard) -> Quotient:
    """x with the column factors that give columns of norm √rows."""
    return replace(x, col=_normalized(x.col, sums.unsqueeze(-2), shard.rows, least))


def _normalized(factor: Tensor, sums: Tensor, size: int, least: Number) -> Tensor:
    """The factors that change norms from the roots of ``sums`` to √size."""
    ratio = size**0.5 / sums.sqrt().clamp(min=least)
    return torch.mul(factor, ratio).clamp_(max=LARGEST)


@_makers.makes(passes.NormalizeWholeRows)
def normalize_whole_rows(
    x: Quotient, least: Number, like: Gradient, shard: Shard
) -> tuple[Quotient, Tensor]:
    """Normalizes each row as soon as it is read, and adds up its new squares over columns."""
    assert shard.holds_rows
    row, root = torch.zeros_like(x.row), shard.cols**0.5
    sums = row.new_zeros(shard.mats, shard.cols)
    for b in scratch.blocks(shard):
        values = read(x.x, b)
        square = torch.mul(values, x.col[b.mats], out=output_buffer(values, x.x)).square_()
        before = x.row[b.mats, b.rows].squeeze(-1) * x.scale
        norms = before.abs() * square.sum(2).sqrt_()
        new = (before * (root / norms.clamp(min=least))).clamp_(max=LARGEST)
        row[b.mats, b.rows, 0] = new
        sums[b.mats] += square.mul_(new.square().unsqueeze(2)).sum(1)
    return replace(x, row=row, scale=1.0), sums
