"""Passes over whole rows that are wider than any tile, which they read twice, tile by tile.

The first read gives the row sums. The second gives the column sums, which depend on the row sums.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.sums import LARGEST_FACTOR, row_weights
from ds_ext.ops.executors.triton.kernels.table_access import (
    BEFORE,
    COL,
    COLS,
    EPS,
    LERP,
    OUT,
    PART,
    PART2,
    ROW,
    ROWS,
    SCALE,
    START,
    A,
    N,
    X,
    hinted,
    integer,
    number,
    pointer,
    rows_of,
    vectors,
)
from ds_ext.ops.executors.triton.kernels.values import factor_and_bound, scaled


@triton.jit
def wide_weighted_sums(t, tile, P: tl.constexpr):
    """``sums.weighted_sums`` for wide rows."""
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    XD: tl.constexpr = P.XD
    BOUNDED: tl.constexpr = P.BOUNDED
    STRIP: tl.constexpr = P.STRIP
    cols, row, begin, own, mat = _rows(t, tile, STRIP, ALIGNED)
    sums = tl.zeros([STRIP], dtype=tl.float32)
    for c in range(0, cols, TC):
        u, _ = _tile(t, begin, own, c, cols, TC, ALIGNED, XD, BOUNDED)
        sums += tl.sum(u * u, axis=1)
    lerp = number(t, LERP)
    old = tl.load(pointer(t, BEFORE, tl.float32) + row, mask=own, other=1.0)
    old = (1.0 - lerp) * old + lerp * number(t, EPS)
    weights = row_weights(old + lerp / cols.to(tl.float32) * sums)
    tl.store(pointer(t, OUT, tl.float32) + row, sums, mask=own)
    for c in range(0, cols, TC):
        u, j = _tile(t, begin, own, c, cols, TC, ALIGNED, XD, BOUNDED)
        at, square = tile * cols + j, u * u
        tl.store(pointer(t, PART, tl.float32) + at, tl.sum(square, axis=0), mask=j < cols)
        divided = tl.sum(square * weights[:, None], axis=0)
        tl.store(pointer(t, PART2, tl.float32) + at, divided, mask=j < cols)


@triton.jit
def normalize_wide_rows(t, tile, P: tl.constexpr):
    """``sums.normalize_whole_rows`` for wide rows."""
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    XD: tl.constexpr = P.XD
    BOUNDED: tl.constexpr = P.BOUNDED
    STRIP: tl.constexpr = P.STRIP
    cols, row, begin, own, mat = _rows(t, tile, STRIP, ALIGNED)
    by_col = pointer(t, COL, tl.float32) + mat * cols
    sums = tl.zeros([STRIP], dtype=tl.float32)
    for c in range(0, cols, TC):
        u, j = _tile(t, begin, own, c, cols, TC, ALIGNED, XD, BOUNDED)
        u *= tl.load(by_col + j, mask=j < cols, other=0.0)[None, :]
        sums += tl.sum(u * u, axis=1)
    old = tl.load(pointer(t, ROW, tl.float32) + row, mask=own, other=0.0) * number(t, SCALE)
    norm, least = tl.abs(old) * tl.sqrt(sums), number(t, EPS)
    new = old * (number(t, A) / tl.where(norm < least, least, norm))  # NaN stays NaN
    new = tl.where(own, tl.where(new > LARGEST_FACTOR, LARGEST_FACTOR, new), 0.0)
    tl.store(pointer(t, OUT, tl.float32) + row, new, mask=own)
    for c in range(0, cols, TC):
        u, j = _tile(t, begin, own, c, cols, TC, ALIGNED, XD, BOUNDED)
        u *= tl.load(by_col + j, mask=j < cols, other=0.0)[None, :]
        at = tile * cols + j
        total = tl.sum(u * u * (new * new)[:, None], axis=0)
        tl.store(pointer(t, PART, tl.float32) + at, total, mask=j < cols)


@triton.jit
def _rows(t, tile, STRIP: tl.constexpr, ALIGNED: tl.constexpr):
    """The rows of a strip.

    Returns the number of columns, the rows counted through all matrices [STRIP], their offsets in
    the run, the mask of the run's rows, their matrix.
    """
    rows, cols = integer(t, ROWS), hinted(integer(t, COLS), ALIGNED)
    mat, top = rows_of(t, tile, STRIP)
    r = top + tl.arange(0, STRIP)
    row = mat * rows + r
    begin = row * cols - integer(t, START)
    return cols, row, begin, (r < rows) & (begin >= 0) & (begin < integer(t, N)), mat


@triton.jit
def _tile(
    t, begin, own, c, cols, TC: tl.constexpr, ALIGNED: tl.constexpr,
    XD: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Columns [c, c + TC) of these rows -> fp32 values [STRIP, TC], 0 outside the run; columns."""
    j = c + tl.arange(0, TC)
    factor, most = factor_and_bound(t, BOUNDED)
    ok = own[:, None] & (j < cols)[None, :]
    at = vectors(t, X, XD, ALIGNED) + hinted(begin, ALIGNED)[:, None] + j[None, :]
    return scaled(tl.load(at, mask=ok, other=0.0), factor, most, BOUNDED), j
