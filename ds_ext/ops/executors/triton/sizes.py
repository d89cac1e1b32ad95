"""The sizes of tiles and launches, none of which changes what is computed but for sums' order.

They need no Triton. To be tuned on a GPU.
"""

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
