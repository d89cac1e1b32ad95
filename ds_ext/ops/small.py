"""Stacks of matrices of a few elements each, as the weights of convolutions are [out, in, h, w].

Torch adds up and multiplies along dimensions of three elements an element at a time. A stack is
therefore one matrix here, a row for each of its matrices, and sums over their rows and columns
are products with a matrix of zeros and ones: a call for all.
"""

import functools

import torch
from torch import Tensor

from ds_ext.ops.shard import Block, Shard

MOST = 256  # elements of a small matrix


def is_small(shard: Shard) -> bool:
    """Whether a parameter is a stack of small matrices."""
    return shard.mats > 1 and 0 < shard.rows * shard.cols <= MOST


def holds_whole(b: Block, mats: int, rows: int, cols: int) -> bool:
    """Whether a block is whole matrices of a stack of ``mats`` small ones."""
    return mats > 1 and rows * cols <= MOST and b.shape[1:] == (rows, cols)


def row_sums(x: Tensor) -> Tensor:
    """Sums over the rows of matrices, [mats, rows, cols] -> [mats, rows]."""
    return x.view(len(x), -1) @ _places(0, *x.shape[1:], x.dtype, x.device)


def col_sums(x: Tensor) -> Tensor:
    """Sums over their columns -> [mats, cols]."""
    return x.view(len(x), -1) @ _places(1, *x.shape[1:], x.dtype, x.device)


def of_rows(x: Tensor, cols: int) -> Tensor:
    """A number of each row for all of its elements, [mats, rows] -> [mats, rows, cols]."""
    places = _places(0, x.shape[1], cols, x.dtype, x.device)
    return (x @ places.T).view(*x.shape, cols)


def of_cols(x: Tensor, rows: int) -> Tensor:
    """A number of each column for all of its elements, [mats, cols] -> [mats, rows, cols]."""
    mats, cols = x.shape
    return (x @ _places(1, rows, cols, x.dtype, x.device).T).view(mats, rows, cols)


def sums(x: Tensor) -> Tensor:
    """Sums over the last dimension, [mats, n] -> [mats, 1]."""
    return x @ torch.ones(x.shape[1], 1, dtype=x.dtype, device=x.device)


@functools.lru_cache(maxsize=64)
def _places(side: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 where an element of a matrix is in a row (side 0) or column (1) -> [rows * cols, n]."""
    n = (rows, cols)[side]
    at = torch.arange(rows * cols, dtype=torch.int64, device=device)
    number = at % cols if side else at // cols
    every = torch.arange(n, dtype=torch.int64, device=device)
    return (number.unsqueeze(1) == every).to(dtype)
