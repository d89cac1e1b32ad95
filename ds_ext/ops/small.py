"""Stacks of matrices of a few elements each, as the weights of convolutions are [out, in, h, w].

Torch passes along dimensions of three elements an element at a time. Here it passes along the
stack: a call for each row or column, over those of all matrices.
"""

import functools

import torch
from torch import Tensor

from ds_ext.ops.shard import Block, Shard

MOST = 16  # rows, and columns, of a small matrix


def is_small(shard: Shard) -> bool:
    """Whether a parameter is a stack of small matrices."""
    return shard.mats > 1 and 0 < shard.rows <= MOST and 0 < shard.cols <= MOST


def holds_whole(b: Block, mats: int, rows: int, cols: int) -> bool:
    """Whether a block is whole matrices of a stack of ``mats`` small ones."""
    return mats > 1 and rows <= MOST and cols <= MOST and b.shape[1:] == (rows, cols)


def sums(x: Tensor, dim: int) -> Tensor:
    """Sums over a short dimension, which goes; a part of ``x`` itself where it has one element."""
    return functools.reduce(torch.add, x.unbind(dim))


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out ← x · the factor of the row, [mats, rows, cols] · [mats, rows]."""
    for j in range(x.shape[2]):
        torch.mul(x[:, :, j], factor, out=out[:, :, j])
    return out


def scale_cols(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out ← x · the factor of the column, [mats, rows, cols] · [mats, cols]."""
    for i in range(x.shape[1]):
        torch.mul(x[:, i], factor, out=out[:, i])
    return out


def subtract_(old: Tensor, x: Tensor, factor: Tensor, weight: float) -> Tensor:
    """old ← old − weight · x · the factor of the row."""
    for j in range(x.shape[2]):
        old[:, :, j].addcmul_(x[:, :, j], factor, value=-weight)
    return old
