"""Divides the runs of a batch into tiles: the geometry in the rows of a launch's table."""

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
    at = _by_rows(g, sizes.TR)
    height = touched(g) * at["down"]
    return build_tiles(height * across(g), **at, height=height * sizes.TR)


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


def across(g: Geometry) -> Int64s:
    """The number of tiles side by side."""
    return -(-g.cols // sizes.TC)


def touched(g: Geometry) -> Int64s:
    """The number of matrices that each run touches."""
    size = g.rows * g.cols
    return np.where(g.n > 0, (g.start + g.n - 1) // size - g.start // size + 1, 0)
