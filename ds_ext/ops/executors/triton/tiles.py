"""Divides the runs of a batch into tiles, and reduces the partial sums that a pass leaves for each.

Tiles are the geometry in the rows of a launch's table. Another launch, a fold, makes reductions.
The sizes of tiles only change the order of sums. They were chosen by the times of an H100.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_ext.ops.schema import AT, TILE
from ds_ext.ops.shard import WIDEST

TR, TC, WARPS = 32, 128, 4  # rows, columns and warps of a tile
SUMS_TR, SUMS_TC = 64, 64  # of ``row_col_sums``
MANY_WARPS = {"IS_ADAM", "IS_ADAM_STEP"}  # inputs that need many registers for an element
ALIGNMENT = 16  # elements, and bytes of an address: vectors of 16 bytes for every dtype
# A program of ``weighted_sums`` reads a strip of whole rows, some rows at a time, in a tile whose
# width is the next power of two, at least NARROWEST. A warp has
# STRIP_COLS columns or more, so that a thread adds up whole columns; a thread has STRIP_ELEMENTS,
# or more of a single row. The pass writes 8 / strip bytes of partial sums per element, which
# ``fold`` reads again: STRIPS are the largest and smallest heights of a strip, which add 3 and 12 %
# to the 8 bytes of AdaLomo's step. The height is the largest power of two with which a run has
# PROGRAMS programs, two for nearly all of 132 multiprocessors.
STRIPS, PROGRAMS = (64, 16), 256
NARROWEST = 2**10
STRIP_COLS, STRIP_ELEMENTS, STRIP_WARPS = 256, 32, 8
FOLD_ROWS, FOLD_COLS = 128, 32  # partial sums per iteration
# Passes with one program per parameter, which waits for memory: the more warps, the shorter.
LONG = 2**12  # ``factors``: rows or columns per iteration; ``cached_norm``: tiles
LONG_WARPS = 32
# Groups of int8 weights that a program stores or expands. A warp alone waits for no other.
ENCODED_GROUPS, ENCODE_WARPS, DECODED_GROUPS = 32, 1, 128


Int64s: TypeAlias = NDArray[np.int64]  # one for each parameter, [n]
Constants: TypeAlias = tuple[tuple[str, Any], ...]  # of a kernel: names and values
Named: TypeAlias = Mapping[str, Any]  # the same by name
LaunchConfig: TypeAlias = tuple[dict[str, int], int]  # the constants that are sizes, and the warps


def shape_of(kernel: str, named: Named) -> LaunchConfig:
    """Returns the shape of a pass from its other constants."""
    tile = {"TR": TR, "TC": TC}
    match kernel:
        case "row_col_sums":
            tile = {"TR": SUMS_TR, "TC": SUMS_TC}
        case "weighted_sums":
            wide = named["TC"]
            warps = min(STRIP_WARPS, wide // STRIP_COLS)
            return {"TR": max(1, 32 * warps * STRIP_ELEMENTS // wide), "TC": wide}, warps
        case "factors" | "clipped_factors":
            return {"TC": LONG}, LONG_WARPS
        case "fold":
            return {"TR": FOLD_ROWS, "TC": FOLD_COLS}, WARPS
        case "cached_norm":  # which reads its tiles only if necessary
            return {**tile, "LONG": LONG}, LONG_WARPS
    # without vectors each element needs its own address: fewer elements per thread
    is_heavy = named.get("FORM") in MANY_WARPS or not named["ALIGNED"]
    return tile, 2 * WARPS if is_heavy else WARPS


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
    aligned = np.bitwise_or.reduce(ends) % ALIGNMENT == 0
    return Tiles(rows, programs, aligned, widths)


def flat(g: Geometry) -> Tiles:
    """Runs as rows of one tile's width, regardless of their matrices."""
    rows = -(-g.n // TC)
    down = -(-rows // TR)
    return build_tiles(down, start=0, n=g.n, origin=g.origin, rows=rows, cols=TC, down=down)


def by_matrix(g: Geometry, height: int = TR, width: int = TC) -> Tiles:
    """Runs as tiles of the matrices they touch."""
    at = _by_rows(g, height)
    down = touched(g) * at["down"]
    return build_tiles(down * -(-g.cols // width), **at, height=down * height)


def by_strip(g: Geometry) -> Tiles:
    """Runs as strips of whole rows of the matrices they touch."""
    assert (g.cols <= WIDEST).all(), "rows that no program holds"
    strip = _strips(g)
    at = _by_rows(g, strip)
    widths = [max(NARROWEST, 1 << (int(n) - 1).bit_length()) for n in g.cols]
    return build_tiles(touched(g) * at["down"], np.array(widths), **at, height=strip)


def _strips(g: Geometry) -> Int64s:
    """The height of each run's strips: lower where a run has few rows."""
    largest, smallest = STRIPS
    strip = np.full_like(g.n, largest)
    for _ in range((largest // smallest).bit_length() - 1):
        few = touched(g) * _by_rows(g, strip)["down"] < PROGRAMS
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
    wide = -(-g.cols // SUMS_TC)
    firsts, total = _offsets(wide * height)
    owners, mat = _by_matrix(mats)
    high = (at.of("down") * SUMS_TR)[owners]
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
    is_one, width = stride == 1, FOLD_COLS
    return build_tiles(
        -(-n // width),
        rows=np.where(is_one, -(-k // width), k),
        cols=np.where(is_one, width, stride),
        n=np.where(is_one, width, n),
        height=k * stride,
        total=is_one,
    )
