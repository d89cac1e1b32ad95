"""Reductions of the partial sums that a pass leaves for each tile, which another launch makes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_ext.ops.executors.triton import sizes, tiles
from ds_ext.ops.executors.triton.tiles import Geometry, Int64s, Tiles


@dataclass(frozen=True)
class PartialSums:
    """The partial sums of a batch in one tensor, and their reductions.

    A parameter may have several reductions.
    """

    firsts: Int64s  # index of each parameter's partial sums
    total: int  # size of the tensor, elements
    tiles: Tiles  # of the reductions
    owners: Int64s  # the parameter of each reduction
    parts: Int64s  # offset of its partial sums in the tensor, bytes
    outs: Int64s  # offset of its output in the parameter's output, bytes


def joined(of_each: Sequence[Tiles]) -> Tiles:
    """Returns the tiles of several reductions, which share a launch."""
    rows = np.concatenate([one.rows for one in of_each])
    return Tiles(rows, np.concatenate([one.programs for one in of_each]))


def _offsets(counts: Int64s) -> tuple[Int64s, int]:
    """The indices of ``counts`` numbers of each parameter, aligned to 16 bytes; their end."""
    ends = np.cumsum(-(-counts // 4) * 4)
    return np.concatenate([[0], ends[:-1]]), int(ends[-1])


def of_tiles(g: Geometry, at: Tiles) -> PartialSums:
    """Reduces one partial sum per tile to one sum per parameter."""
    (firsts, total), owners = _offsets(at.programs), np.arange(len(g.n))
    return PartialSums(firsts, total, _of_one(at.programs), owners, 4 * firsts, 0 * owners)


def of_rows(g: Geometry) -> Tiles:
    """Reduces the sums of whole rows to one sum per parameter."""
    return _of_one(g.mats * g.rows)


def _of_one(counts: Int64s) -> Tiles:
    """Reduces ``counts`` numbers of each parameter to one sum."""
    ones = np.ones_like(counts)
    return _sums(counts, ones, ones)


def row_sums(g: Geometry, at: Tiles) -> PartialSums:
    """Reduces row sums: per parameter [tiles across, mats touched, rows of their tiles]."""
    down, mats = at.of("down"), tiles.touched(g)
    height, wide = at.of("height"), tiles.across(g)
    firsts, total = _offsets(wide * height)
    owners, mat = _by_matrix(mats)
    high = (down * sizes.TR)[owners]
    rows, row0 = g.rows[owners], at.of("row0")[owners]
    sums = _sums(wide[owners], height[owners], np.minimum(high, rows - row0))
    outs = 4 * ((at.of("mat0")[owners] + mat) * rows + row0)
    return PartialSums(firsts, total, sums, owners, 4 * (firsts[owners] + mat * high), outs)


def col_sums(g: Geometry, at: Tiles) -> PartialSums:
    """Reduces column sums: per parameter [mats touched, tiles down, cols]."""
    down, mats = at.of("down"), tiles.touched(g)
    firsts, total = _offsets(mats * down * g.cols)
    owners, mat = _by_matrix(mats)
    cols, high = g.cols[owners], down[owners]
    sums = _sums(high, cols, cols)
    outs = 4 * (at.of("mat0")[owners] + mat) * cols
    return PartialSums(firsts, total, sums, owners, 4 * (firsts[owners] + mat * high * cols), outs)


def _by_matrix(mats: Int64s) -> tuple[Int64s, Int64s]:
    """For every matrix: its parameter, and its index among the parameter's matrices."""
    owners = np.repeat(np.arange(len(mats)), mats)
    firsts = np.cumsum(mats) - mats
    return owners, np.arange(len(owners)) - firsts[owners]


def _sums(k: Int64s, stride: Int64s, n: Int64s) -> Tiles:
    """Tiles that sum [k, stride] over k for the first n columns; stride 1 is read as rows of TC."""
    is_one = stride == 1
    wide = np.where(is_one, sizes.TC, stride)
    return tiles.build_tiles(
        -(-n // sizes.TC),
        rows=np.where(is_one, -(-k // sizes.TC), k),
        cols=wide,
        n=np.where(is_one, sizes.TC, n),
        height=k * stride,
        total=is_one,
    )
