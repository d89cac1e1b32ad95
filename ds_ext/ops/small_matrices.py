"""Stacks of tiny matrices, such as the weights of convolutions, [out, in, h, w].

Torch iterates over dimensions of three elements one element at a time. Here a block of a stack is
laid out as planes, [rows, cols, mats]: one call per matrix element, over all matrices.
"""

import functools

import torch
from torch import Tensor

from ds_ext.ops import scratch
from ds_ext.ops.shard import Block

MOST = 16  # the most rows, and columns, of a small matrix


def holds_whole(b: Block, mats: int, rows: int, cols: int) -> bool:
    """Returns whether a block consists of whole matrices of a stack of ``mats`` small ones."""
    return mats > 1 and rows <= MOST and cols <= MOST and b.shape[1:] == (rows, cols)


def square_planes(x: Tensor) -> Tensor:
    """Returns the squares of a block, [mats, rows, cols] -> [rows, cols, mats], in scratch."""
    mats, rows, cols = x.shape
    planes = scratch.empty((rows, cols, mats), x.dtype, x.device)
    elements = x.reshape(mats, rows * cols).unbind(1)
    for element, plane in zip(elements, planes.view(rows * cols, mats), strict=True):
        torch.mul(element, element, out=plane)
    return planes


def write_row_sums(out: Tensor, planes: Tensor) -> None:
    """Writes the sums over the columns of planes [rows, cols, mats] to ``out`` [mats, rows]."""
    _write(out, _sums(planes.unbind(1)))


def write_col_sums(out: Tensor, planes: Tensor) -> None:
    """Writes the sums over the rows of planes [rows, cols, mats] to ``out`` [mats, cols]."""
    _write(out, _sums(planes.unbind(0)))


def scale_rows_(planes: Tensor, factor: Tensor) -> None:
    """Multiplies planes [rows, cols, mats] in place by one factor per row, [mats, rows]."""
    if factor.shape[1] == 1:
        planes.mul_(factor.view(-1))
        return
    for i in range(len(planes)):
        planes[i].mul_(factor[:, i])


def sums(x: Tensor) -> Tensor:
    """Returns the sum of each matrix's numbers, [mats, n] -> [mats]; a view of x if n is 1."""
    return _sums(x.unbind(1)) if 0 < x.shape[1] <= MOST else x.sum(1)


def scale_(x: Tensor, row: Tensor, col: Tensor, out: Tensor) -> Tensor:
    """Writes x · row · col, [mats, rows, cols] · [mats, rows] · [mats, cols], to ``out`` -> out."""
    mats, rows, cols = x.shape
    if rows == cols == 1:
        return torch.mul(x, row.view(-1, 1, 1), out=out).mul_(col.view(-1, 1, 1))
    which_row, which_col = _positions(rows, cols, x.device)
    factor = scratch.empty((mats, rows * cols), x.dtype, x.device)
    torch.index_select(col, 1, which_col, out=factor)
    out = torch.mul(x, factor.view(x.shape), out=out)
    torch.index_select(row, 1, which_row, out=factor)
    return out.mul_(factor.view(x.shape))


@functools.cache
def _positions(rows: int, cols: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the column of each element of a matrix, [rows · cols] each."""
    at = torch.arange(rows * cols, dtype=torch.int64, device=device)
    return at // cols, at % cols


def _sums(planes: tuple[Tensor, ...]) -> Tensor:
    """The sum of planes; the plane itself if there is only one."""
    if len(planes) == 1:
        return planes[0]
    first, second, *others = planes
    total = torch.add(first, second, out=scratch.like(first))
    for other in others:
        total.add_(other)
    return total


def _write(out: Tensor, planes: Tensor) -> None:
    """out [mats, n] ← planes [n, mats]."""
    for column, plane in zip(out.unbind(1), planes, strict=True):
        column.copy_(plane)
