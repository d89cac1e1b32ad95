"""The tile size and the number of warps of each pass.

Sizes only change the order of sums. They were chosen by the times of an H100.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

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
# PROGRAMS programs, two for nearly all of 132 multiprocessors. Rows wider than block_sizes.WIDEST
# are read twice, in tiles of TR x TC.
STRIPS, PROGRAMS = (64, 16), 256
NARROWEST = 2**10
STRIP_COLS, STRIP_ELEMENTS, STRIP_WARPS = 256, 32, 8
FOLD_ROWS, FOLD_COLS = 128, 32  # partial sums per iteration
# Passes with one program per parameter, which waits for memory: the more warps, the shorter.
LONG = 2**12  # ``factors``: rows or columns per iteration; ``cached_norm``: tiles
LONG_WARPS = 32
# Groups of int8 weights that a program stores or expands. A warp alone waits for no other.
ENCODED_GROUPS, ENCODE_WARPS, DECODED_GROUPS = 4, 1, 16

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
