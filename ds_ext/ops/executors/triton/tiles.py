"""Divides the runs of a batch into tiles, and reduces the partial sums that a pass leaves for each.

Tiles are the geometry in the rows of a launch's table. Another launch, a fold, makes reductions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_ext.ops.executors.triton import sizes
from ds_ext.ops.executors.triton.sizes import Constants
from ds_ext.ops.schema import AT, TILE

Int64s: TypeAlias = NDArray[np.int64]  # one for each parameter, [n]


@dataclass(frozen=True)
class Geometry:
    """Runs [start, start + n) of [mats, rows, cols]; their random bits count from ``origin``."""

    start: Int64s
    n: Int64s
    mats: Int64s
    rows: Int64s
    cols: Int64s
    origin: Int64s


@dataclass(frozen=True)
class Tiles:
    """The rows of a table, [n, columns], and the number of programs (tiles) of each."""

    rows: Int64s
    programs: Int64s
    aligned: NDArray[np.bool_] | None = None  # whether no vector crosses the end of a row or run
    widths: Int64s | None = None  # of tiles as wide as rows

    def of(self, name: str) -> Int64s:
        """Returns a column, [n]."""
        column: Int64s = self.rows[:, AT[name]]
        return column

    def kinds(self, are_even: NDArray[np.bool_] | None) -> list[tuple[Constants, Int64s]]:
        """Returns the parameters that share a launch, with the kernel's constants for their tiles.

        Args:
            are_even: whether the runs of each parameter begin at multiples of 16 bytes, [n]; None:
                all do.
        """
        if self.aligned is None:
            return [((), np.arange(len(self.rows)))]
        aligned = self.aligned if are_even is None else self.aligned & are_even
        found: dict[Constants, list[int]] = {}
        for i, is_aligned in enumerate(aligned.tolist()):
            kind: Constants = (("ALIGNED", is_aligned),)
            if self.widths is not None:
                kind = (*kind, ("TC", int(self.widths[i])))
            found.setdefault(kind, []).append(i)
        return [(kind, np.array(members)) for kind, members in found.items()]


def build_tiles(programs: Int64s, widths: Int64s | None = None, **columns: Int64s | int) -> Tiles:
    """Returns tiles whose rows have these columns; the caller fills in the others."""
    rows = np.zeros((len(programs), len(TILE)), dtype=np.int64)
    rows[:, AT["total"]] = programs
    for name, column in columns.items():
        rows[:, AT[name]] = column
    if not {"start", "n", "cols"} <= columns.keys():
        return Tiles(rows, programs)
    ends = [rows[:, AT[name]] for name in ("start", "n", "cols", "origin")]
    aligned = np.bitwise_or.reduce(ends) % sizes.ALIGNMENT == 0
    return Tiles(rows, programs, aligned, widths)


def flat(g: Geometry) -> Tiles:
    """Runs as rows of one tile's width, regardless of their matrices."""
    rows = -(-g.n // sizes.TC)
    down = -(-rows // sizes.TR)
    return build_tiles(down, start=0, n=g.n, origin=g.origin, rows=rows, cols=sizes.TC, down=down)


def by_matrix(g: Geometry) -> Tiles:
    """Runs as tiles of the matrices they touch."""
    return _of_matrices(g, sizes.TR, sizes.TC)


def for_sums(g: Geometry) -> Tiles:
    """The tiles of sums over rows and columns."""
    return _of_matrices(g, sizes.SUMS_TR, sizes.SUMS_TC)


def _of_matrices(g: Geometry, height: int, width: int) -> Tiles:
    at = _by_rows(g, height)
    down = touched(g) * at["down"]
    return build_tiles(down * -(-g.cols // width), **at, height=down * height)


def by_strip(g: Geometry) -> Tiles:
    """Runs as strips of whole rows of the matrices they touch."""
    strip = _strips(g)
    at = _by_rows(g, strip)
    widths = [max(sizes.NARROWEST, 1 << (int(n) - 1).bit_length()) for n in g.cols]
    return build_tiles(touched(g) * at["down"], np.array(widths), **at, height=strip)


def _strips(g: Geometry) -> Int64s:
    """The height of each run's strips: lower where a run has few rows."""
    largest, smallest = sizes.STRIPS
    strip = np.full_like(g.n, largest)
    for _ in range((largest // smallest).bit_length() - 1):
        few = touched(g) * _by_rows(g, strip)["down"] < sizes.PROGRAMS
        strip = np.where(few & (strip > smallest), strip // 2, strip)
    return strip


def by_parameter(g: Geometry) -> Tiles:
    """One program per parameter for all its statistics."""
    return build_tiles(np.ones_like(g.n), mats=g.mats, rows=g.rows, cols=g.cols)


def _by_rows(g: Geometry, height: Int64s | int) -> dict[str, Int64s]:
    """The geometry of tiles that are ``height`` rows high."""
    first, last = g.start // g.cols, (g.start + g.n - 1) // g.cols
    is_one = touched(g) == 1  # then tiles only cover the rows of the run
    rows = np.where(is_one, last - first + 1, g.rows)
    down = np.where(g.n > 0, -(-rows // height), 0)
    at = {"start": g.start, "n": g.n, "rows": g.rows, "cols": g.cols, "origin": g.origin}
    row0 = np.where(is_one, first % g.rows, 0)
    return at | {"mat0": first // g.rows, "row0": row0, "down": down}


def touched(g: Geometry) -> Int64s:
    """The number of matrices that each run touches."""
    size = g.rows * g.cols
    return np.where(g.n > 0, (g.start + g.n - 1) // size - g.start // size + 1, 0)


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
    mats, height = touched(g), at.of("height")
    wide = -(-g.cols // sizes.SUMS_TC)
    firsts, total = _offsets(wide * height)
    owners, mat = _by_matrix(mats)
    high = (at.of("down") * sizes.SUMS_TR)[owners]
    rows, row0 = g.rows[owners], at.of("row0")[owners]
    sums = _sums(wide[owners], height[owners], np.minimum(high, rows - row0))
    outs = 4 * ((at.of("mat0")[owners] + mat) * rows + row0)
    return PartialSums(firsts, total, sums, owners, 4 * (firsts[owners] + mat * high), outs)


def col_sums(g: Geometry, at: Tiles) -> PartialSums:
    """Reduces column sums: per parameter [mats touched, tiles down, cols]."""
    down, mats = at.of("down"), touched(g)
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
    """Tiles that sum [k, stride] over k for the first n columns; stride 1 is read as tiles."""
    is_one, width = stride == 1, sizes.FOLD_COLS
    return build_tiles(
        -(-n // width),
        rows=np.where(is_one, -(-k // width), k),
        cols=np.where(is_one, width, stride),
        n=np.where(is_one, width, n),
        height=k * stride,
        total=is_one,
    )
