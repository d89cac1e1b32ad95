"""How the partial sums of a pass, which its tiles leave, are added up by a launch after it."""

from dataclasses import dataclass

import numpy as np

from ds_ext.ops.executors.triton import sizes, tiles
from ds_ext.ops.executors.triton.tiles import Geometry, Int64s, Tiles


@dataclass(frozen=True)
class Parts:
    """Where the tiles of each parameter leave their sums, in a tensor of them all."""

    starts: Int64s  # bytes
    total: int  # numbers


@dataclass(frozen=True)
class Fold:
    """Sums of partial sums, several for a parameter."""

    tiles: Tiles
    owners: Int64s  # the parameter of each
    parts: Int64s  # where its partial sums begin, bytes from those of the batch
    outs: Int64s  # and where in its parameter's results it goes, bytes


def parts(counts: Int64s) -> Parts:
    """Returns room for so many numbers of each parameter, from multiples of 16 bytes on."""
    ends = np.cumsum(-(-counts // 4) * 4)
    starts = np.concatenate([[0], ends[:-1]])
    return Parts(4 * starts, int(ends[-1]))


def of_tiles(programs: Int64s) -> tuple[Parts, Fold]:
    """One number left by each tile -> one sum of each parameter."""
    made, owners = parts(programs), np.arange(len(programs))
    return made, Fold(of_one(programs), owners, made.starts, np.zeros_like(programs))


def of_one(counts: Int64s) -> Tiles:
    """So many numbers of each parameter -> one sum."""
    ones = np.ones_like(counts)
    return _sums(counts, ones, ones)


def row_sums(g: Geometry, at: Tiles) -> tuple[Parts, Fold]:
    """Sums over each row: [tiles across, mats touched, rows of their tiles], for each parameter."""
    down, mats = at.of("down"), tiles.touched(g)
    height, wide = at.of("height"), tiles.across(g)
    made = parts(wide * height)
    owners, mat = _by_matrix(mats)
    high = (down * sizes.TR)[owners]
    rows, row0 = g.rows[owners], at.of("row0")[owners]
    sums = _sums(wide[owners], height[owners], np.minimum(high, rows - row0))
    outs = 4 * ((at.of("mat0")[owners] + mat) * rows + row0)
    return made, Fold(sums, owners, made.starts[owners] + 4 * mat * high, outs)


def col_sums(g: Geometry, at: Tiles) -> tuple[Parts, Fold]:
    """Sums over each column: [mats touched, tiles down, cols], for each parameter."""
    down, mats = at.of("down"), tiles.touched(g)
    made = parts(mats * down * g.cols)
    owners, mat = _by_matrix(mats)
    cols, high = g.cols[owners], down[owners]
    sums = _sums(high, cols, cols)
    outs = 4 * (at.of("mat0")[owners] + mat) * cols
    return made, Fold(sums, owners, made.starts[owners] + 4 * mat * high * cols, outs)


def _by_matrix(mats: Int64s) -> tuple[Int64s, Int64s]:
    """The parameter of each of all matrices, and which of its own it is."""
    owners = np.repeat(np.arange(len(mats)), mats)
    firsts = np.cumsum(mats) - mats
    return owners, np.arange(len(owners)) - firsts[owners]


def _sums(k: Int64s, stride: Int64s, n: Int64s) -> Tiles:
    """Sums over k of numbers [k, stride], the first n of each; of one each, as rows of a tile."""
    is_one = stride == 1
    wide = np.where(is_one, sizes.TC, stride)
    return tiles.made(
        -(-n // sizes.TC),
        rows=np.where(is_one, -(-k // sizes.TC), k),
        cols=wide,
        n=np.where(is_one, sizes.TC, n),
        height=k * stride,
        total=is_one,
    )
