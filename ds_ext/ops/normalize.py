"""Rows and columns of a matrix brought to an RMS of 1, as factors of a ``Quotient``.

Only the factors change from one normalization to the next: no copy of the matrix is made.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ds_ext.ops import batched, scratch
from ds_ext.ops.lazy import Gradient, Quotient, Readable, accumulator, read, room
from ds_ext.ops.shard import Shard
from ds_ext.ops.sources import Number
from ds_ext.ops.triton import launches

__all__ = ["normalize_columns", "normalize_rows", "normalize_whole_rows", "unit_quotient"]

# What a factor is at most: rows and columns of zeros stay zeros however often they are multiplied,
# and the product of the factors of both is a finite fp32 number.
LARGEST = 1e18


@batched.on_batches(batched.unit_quotient)
def unit_quotient(x: Readable, shard: Shard, like: Gradient) -> Quotient:
    """Returns x as a quotient whose factors are all 1."""
    dtype = accumulator(like.dtype)
    row = torch.ones(shard.mats, shard.rows, 1, dtype=dtype, device=like.device)
    return Quotient(x, row, row.new_ones(shard.mats, 1, shard.cols))


@batched.on_batches(batched.normalize_rows)
def normalize_rows(x: Quotient, sums: Tensor, least: Number, shard: Shard) -> Quotient:
    """Returns x with rows of norm √cols.

    Args:
        x: [mats, rows, cols].
        sums: of its squares over each row, over all ranks, [mats, rows].
        least: what a row's norm is taken for at least.
        shard: the geometry of the run.
    """
    row = _normalized(x.row, sums.unsqueeze(-1), shard.cols, least)
    return replace(x, row=row)


@batched.on_batches(batched.normalize_columns)
def normalize_columns(x: Quotient, sums: Tensor, least: Number, shard: Shard) -> Quotient:
    """Returns x with columns of norm √rows, from sums of its squares [mats, cols]; as above."""
    col = _normalized(x.col, sums.unsqueeze(-2), shard.rows, least)
    return replace(x, col=col)


def _normalized(factor: Tensor, sums: Tensor, size: int, least: Number) -> Tensor:
    """The factors that bring norms from the roots of ``sums`` to √size."""
    ratio = size**0.5 / sums.sqrt().clamp(min=least)
    return torch.mul(factor, ratio).clamp_(max=LARGEST)


@batched.on_batches(batched.normalize_whole_rows)
@launches.tried(launches.normalize_whole_rows)
def normalize_whole_rows(
    x: Quotient, least: Number, shard: Shard, like: Gradient
) -> tuple[Quotient, Tensor]:
    """Returns x as ``normalize_rows`` does, and sums of its new squares over columns, [mats, cols].

    Both come of one pass: a row's norm is known as soon as the row is read, for the run has whole
    rows. Factors of other ranks' rows are 0, and sums are those of the run.
    """
    assert shard.holds_rows
    row, root = torch.zeros_like(x.row), shard.cols**0.5
    sums = row.new_zeros(shard.mats, 1, shard.cols)
    ones = row.new_ones(shard.cols)
    for b in scratch.blocks(shard):
        values = read(x.x, b)
        square = torch.mul(values, x.col[b.mats], out=room(values, x.x)).square_()
        before = x.row[b.mats, b.rows].squeeze(-1)
        norms = before * torch.matmul(square, ones).sqrt_()
        new = (before * (root / norms.clamp(min=least))).clamp_(max=LARGEST)
        row[b.mats, b.rows, 0] = new
        sums[b.mats].baddbmm_(new.square().unsqueeze(1), square)
    return replace(x, row=row), sums.squeeze(1)
