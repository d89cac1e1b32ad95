"""The tile size and the number of warps of each pass.

Sizes only change the order of sums. To be tuned on a GPU.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ds_ext.ops.block_sizes import WIDEST

TR, TC, WARPS = 32, 128, 4  # rows, columns and warps of a tile
ALIGNMENT = 16  # elements, and bytes of an address: vectors of 16 bytes for every dtype
# A program of ``weighted_sums`` reads STRIP rows, TR <= WIDE_ROWS at a time, in a tile whose width
# is the next power of two. Each warp has WIDE_COLS columns or more, so that a thread adds up whole
# columns. The pass writes 8 / STRIP bytes of partial sums per element, which ``fold`` reads again:
# STRIPS are the largest and smallest heights of a strip, which add 3 and 12 % to the 8 bytes of
# AdaLomo's step. The height is the largest power of two with which a run has PROGRAMS programs, two
# for nearly all of 132 multiprocessors. With WIDE_ELEMENTS of 16 bits and STAGES = 3, a
# multiprocessor has 64 KiB of loads in flight while it adds up other rows; its share of 4.8 TB/s is
# 36 KiB per microsecond. Rows wider than block_sizes.WIDEST are read twice, in tiles of TR x TC.
STRIPS, PROGRAMS, STAGES = (64, 16), 256, 3
NARROWEST = 2**10
WIDE_ROWS, WIDE_ELEMENTS, WIDE_COLS, WIDE_WARPS = 4, 2**14, 256, 16
LONG, LONG_WARPS = 2**12, 8  # ``factors``: rows or columns per iteration
TILES = 2**10  # ``cached_norm``: tiles per iteration

Constants: TypeAlias = tuple[tuple[str, Any], ...]  # of a kernel: names and values
Named: TypeAlias = Mapping[str, Any]  # the same by name
LaunchConfig: TypeAlias = tuple[dict[str, int], int]  # the constants that are sizes, and the warps


def shape_of(kernel: str, named: Named) -> LaunchConfig:
    """Returns the shape of a pass from its other constants."""
    tile = {"TR": TR, "TC": TC}
    match kernel:
        case "weighted_sums" | "normalize_whole_rows":
            return _of_strips(named)
        case "factors" | "clipped_factors":
            return {"TC": LONG}, LONG_WARPS
        case "fold":
            return tile, WARPS
        case "cached_norm":  # one program per parameter, which reads its tiles only if necessary
            return {**tile, "LONG": TILES}, WARPS
    # without vectors each element needs its own address: fewer elements per thread
    return tile, WARPS if named["ALIGNED"] else 2 * WARPS


def _of_strips(named: Named) -> LaunchConfig:
    """For rows as wide as a tile, which are loaded while earlier rows are added up."""
    wide = named["TC"]
    # two stages if three would not fit into memory, one without vectors
    fits = named["XD"] != "float32" or wide < WIDEST
    stages = min(STAGES, 3 if fits else 2) if named["ALIGNED"] else 1
    shape = {"TR": min(WIDE_ROWS, WIDE_ELEMENTS // wide), "TC": wide, "STAGES": stages}
    return shape, min(WIDE_WARPS, wide // WIDE_COLS)
