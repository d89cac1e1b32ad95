"""How large the tiles of each pass are, and how many warps work on one."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ds_ext.ops.executors.triton import sizes
from ds_ext.ops.schema import GROUP

Shape: TypeAlias = tuple[dict[str, Any], int]  # the constants that are sizes, and warps


def of(kernel: str, named: Mapping[str, Any]) -> Shape:
    """Returns the shape of a pass that has these other constants."""
    return _SHAPES.get(kernel, _of_tiles)(named)


def _of_tiles(named: Mapping[str, Any]) -> Shape:
    """Of a kernel that reads vectors where its runs are aligned."""
    # each element has an address of its own where there are no vectors: fewer to a thread
    warps = sizes.WARPS if named["ALIGNED"] else 2 * sizes.WARPS
    return {"TR": sizes.TR, "TC": sizes.TC}, warps


def _of_recalled(named: Mapping[str, Any]) -> Shape:
    """Of a program for each parameter, which reads tiles where it must."""
    return {"TR": sizes.TR, "TC": sizes.TC, "LONG": sizes.TILES}, sizes.WARPS


def _of_numbers(named: Mapping[str, Any]) -> Shape:
    """Of a program for a number."""
    return {}, sizes.WARPS


def _of_groups(named: Mapping[str, Any]) -> Shape:
    shape, warps = _of_tiles(named)
    return shape | {"TC": GROUP}, warps


def _of_sums(named: Mapping[str, Any]) -> Shape:
    return {"TR": sizes.TR, "TC": sizes.TC}, sizes.WARPS


def _of_statistics(named: Mapping[str, Any]) -> Shape:
    return {"TC": sizes.LONG}, sizes.LONG_WARPS


def _of_strips(named: Mapping[str, Any]) -> Shape:
    """Of rows that are as wide as a tile, and read while those before them are summed."""
    wide = named["TC"]
    # two stages where three would not fit into registers, one where there are no vectors
    fits = named["XD"] != "float32" and wide < sizes.WIDEST
    stages = min(sizes.STAGES, 3 if fits else 2) if named["ALIGNED"] else 1
    shape = {"TR": min(sizes.WIDE_ROWS, sizes.WIDE_ELEMENTS // wide), "TC": wide}
    shape |= {"STRIP": sizes.STRIP, "STAGES": stages}
    return shape, min(sizes.WIDE_WARPS, wide // sizes.WIDE_COLS)


def _of_wide_strips(named: Mapping[str, Any]) -> Shape:
    return {"TC": sizes.TC, "STRIP": sizes.STRIP}, sizes.LONG_WARPS


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
