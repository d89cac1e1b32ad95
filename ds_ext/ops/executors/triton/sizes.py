"""How large the tiles of each pass are, and how many warps work on one.

Sizes change nothing that is computed but the order of sums. To be tuned on a GPU.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ds_ext.ops.schema import GROUP

TR, TC, WARPS = 32, 128, 4  # rows, columns and warps of a tile
ALIGNMENT = 16  # elements, and bytes of an address: vectors of 16 bytes for every dtype
# ``weighted_sums`` takes STRIP rows a program, TR <= WIDE_ROWS at a time, in a tile as wide as the
# least power of two that they fit in. Its warps lie side by side over 256 columns each or more, so
# that columns are added up within a thread. 8 / STRIP bytes an element are left as partial sums,
# and read again by ``fold``: 64 adds 2.5 % to the 10 bytes of AdaLomo's step, and leaves 1024
# programs of 2**28 elements for 132 multiprocessors. Rows that are read while others are summed
# hold, at WIDE_ELEMENTS of 16 bits and STAGES = 3, 64 KiB of a multiprocessor's loads in flight; 36
# KiB every microsecond are its share of 4.8 TB/s. Wider rows than WIDEST are read twice, in tiles
# of STRIP x TC.
STRIP, STAGES = 64, 3
NARROWEST, WIDEST = 2**10, 2**14
WIDE_ROWS, WIDE_ELEMENTS, WIDE_COLS, WIDE_WARPS = 4, 2**14, 256, 16
LONG, LONG_WARPS = 2**12, 8  # ``factors``: as many rows or columns at a time
TILES = 2**10  # ``recall``: of so many at a time a program reads what they have left

Shape: TypeAlias = tuple[dict[str, Any], int]  # the constants that are sizes, and warps


def shape_of(kernel: str, named: Mapping[str, Any]) -> Shape:
    """Returns the shape of a pass that has these other constants."""
    return _SHAPES.get(kernel, _of_tiles)(named)


def _of_tiles(named: Mapping[str, Any]) -> Shape:
    """Of a kernel that reads vectors where its runs are aligned."""
    # each element has an address of its own where there are no vectors: fewer to a thread
    warps = WARPS if named["ALIGNED"] else 2 * WARPS
    return {"TR": TR, "TC": TC}, warps


def _of_recalled(named: Mapping[str, Any]) -> Shape:
    """Of a program for each parameter, which reads tiles where it must."""
    return {"TR": TR, "TC": TC, "LONG": TILES}, WARPS


def _of_numbers(named: Mapping[str, Any]) -> Shape:
    """Of a program for a number."""
    return {}, WARPS


def _of_groups(named: Mapping[str, Any]) -> Shape:
    shape, warps = _of_tiles(named)
    return shape | {"TC": GROUP}, warps


def _of_sums(named: Mapping[str, Any]) -> Shape:
    return {"TR": TR, "TC": TC}, WARPS


def _of_statistics(named: Mapping[str, Any]) -> Shape:
    return {"TC": LONG}, LONG_WARPS


def _of_strips(named: Mapping[str, Any]) -> Shape:
    """Of rows that are as wide as a tile, and read while those before them are summed."""
    wide = named["TC"]
    # two stages where three would not fit into registers, one where there are no vectors
    fits = named["XD"] != "float32" and wide < WIDEST
    stages = min(STAGES, 3 if fits else 2) if named["ALIGNED"] else 1
    shape = {"TR": min(WIDE_ROWS, WIDE_ELEMENTS // wide), "TC": wide}
    shape |= {"STRIP": STRIP, "STAGES": stages}
    return shape, min(WIDE_WARPS, wide // WIDE_COLS)


def _of_wide_strips(named: Mapping[str, Any]) -> Shape:
    return {"TC": TC, "STRIP": STRIP}, LONG_WARPS


_SHAPES: dict[str, Callable[[Mapping[str, Any]], Shape]] = {
    "weighted_sums": _of_strips,
    "normalize_whole_rows": _of_strips,
    "wide_weighted_sums": _of_wide_strips,
    "normalize_wide_rows": _of_wide_strips,
    "factors": _of_statistics,
    "clipped_factors": _of_statistics,
    "normalize": _of_statistics,
    "mark": _of_groups,
    "mend": _of_groups,
    "mend_unmarked": _of_groups,
    "fold": _of_sums,
    "recall": _of_recalled,
    "tell": _of_numbers,
}
