"""Sums of squares over rows and columns, and the reduction of the tiles' partial sums.

There are no atomics: each tile stores its partial sums, and ``fold`` reduces them. The order of a
sum depends on the geometry alone.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels import fields as F
from ds_ext.ops.executors.triton.kernels.table_access import (
    divided,
    elements_of,
    hinted,
    integer,
    number,
    pointer,
    rows_of,
    size,
    vectors,
)
from ds_ext.ops.executors.triton.kernels.values import factor_and_bound, moved, scaled, value_of

LARGEST_FACTOR = tl.constexpr(1e18)  # reference.LARGEST
LARGEST_WEIGHT = tl.constexpr(1e36)  # its square


@triton.jit
def _row_weights(before, sums, lerp, eps, cols):
    """1 / the new statistics of rows, at most LARGEST_WEIGHT: 0 / 0 is 0."""
    found = 1.0 / ((1.0 - lerp) * before + lerp * eps + lerp / cols.to(tl.float32) * sums)
    return tl.where(found > LARGEST_WEIGHT, LARGEST_WEIGHT, found)


@triton.jit
def _normalized(factor, norm, a, least):
    """factor · a / max(norm, least), at most LARGEST_FACTOR; NaN stays NaN."""
    new = factor * (a / tl.where(norm < least, least, norm))
    return tl.where(new > LARGEST_FACTOR, LARGEST_FACTOR, new)


@triton.jit
def _rows(r, mat, rows, cols, start, n):
    """Rows of a matrix -> these counted through all matrices, their offsets in the run, a mask.

    The mask is that of the run's rows.
    """
    row = mat * rows + r
    begin = row * cols - start
    return row, begin, (r < rows) & (begin >= 0) & (begin < n)


@triton.jit
def row_col_sums(t, tile, P: tl.constexpr):
    """Partial sums of squares of a tile: row sums in part, column sums in part2.

    part is [across, row tiles · TR], and part2 [row tiles, cols].
    """
    cols = hinted(integer(t, F.COLS), P)
    down, over = divided(tile, tl.cdiv(size(t, F.COLS), P.TC))
    mat, top = rows_of(t, down, P.TR)
    e, ok = elements_of(t, mat, top, over * P.TC, P)
    u = value_of(t, e, ok, mat, top, over * P.TC, P)
    j = over * P.TC + tl.arange(0, P.TC)
    u = tl.where(ok, u, 0.0)
    square = u * u
    row = over * integer(t, F.HEIGHT) + down * P.TR + tl.arange(0, P.TR)
    tl.store(pointer(t, F.PART, tl.float32) + row, tl.sum(square, axis=1))
    col = vectors(t, F.PART2, tl.float32, P) + down * cols + j
    tl.store(col, tl.sum(square, axis=0), mask=j < cols)


@triton.jit
def weighted_sums(t, tile, P: tl.constexpr):
    """Sums over whole rows of a run, and column sums of strips, [strips, cols].

    IS_RUN: out ← row sums of squares; part ← column sums of squares, part2 ← of squares divided by
    their row's new statistic, before + lerp · (sum / cols + eps − before).

    IS_QUOTIENT: out ← row · √cols / max(norm, eps), where norm is that of a row of row · x · col;
    part ← column sums of the squares of out · x · col.

    A row is no wider than a tile, so it is read once. Loads that are pipelined take longer.
    """
    TC: tl.constexpr = P.TC
    rows, cols = integer(t, F.ROWS), hinted(integer(t, F.COLS), P)
    strip, start, n = size(t, F.HEIGHT), integer(t, F.START), integer(t, F.N)
    x, out = vectors(t, F.X, P.XD, P), pointer(t, F.OUT, tl.float32)
    eps = number(t, F.EPS)
    factor, most = factor_and_bound(t, P)
    mat, top = rows_of(t, tile, strip)
    j = tl.arange(0, P.TC)
    if P.FORM == F.IS_QUOTIENT:
        by_row, root = pointer(t, F.ROW, tl.float32), tl.sqrt_rn(cols.to(tl.float32))
        by_col = tl.load(pointer(t, F.COL, tl.float32) + mat * cols + j, mask=j < cols, other=0.0)
    else:
        before, lerp = pointer(t, F.BEFORE, tl.float32), number(t, F.LERP)
    plain, weighted = tl.zeros([TC], dtype=tl.float32), tl.zeros([TC], dtype=tl.float32)
    for i in tl.range(0, strip, P.TR, num_stages=1):
        row, begin, own = _rows(top + i + tl.arange(0, P.TR), mat, rows, cols, start, n)
        ok = own[:, None] & (j < cols)[None, :]
        values = tl.load(x + hinted(begin, P)[:, None] + j[None, :], mask=ok, other=0.0)
        u = scaled(values, factor, most, P)
        if P.FORM == F.IS_QUOTIENT:
            u = u * by_col[None, :]
        square = u * u
        sums = tl.sum(square, axis=1)
        if P.FORM == F.IS_QUOTIENT:
            old = tl.load(by_row + row, mask=own, other=0.0)
            new = tl.where(own, _normalized(old, tl.abs(old) * tl.sqrt(sums), root, eps), 0.0)
            weights = new * new
        else:
            new = sums
            old = tl.load(before + row, mask=own, other=1.0)
            weights = _row_weights(old, sums, lerp, eps, cols)
            plain += tl.sum(square, axis=0)
        tl.store(out + row, new, mask=own)
        weighted += tl.sum(square * weights[:, None], axis=0)
    part = vectors(t, F.PART, tl.float32, P) + tile * cols + j
    if P.FORM == F.IS_QUOTIENT:
        tl.store(part, weighted, mask=j < cols)
    else:
        tl.store(part, plain, mask=j < cols)
        part2 = vectors(t, F.PART2, tl.float32, P) + tile * cols + j
        tl.store(part2, weighted, mask=j < cols)


@triton.jit
def fold(t, tile, P: tl.constexpr):
    """out[j] ← the sum of part[i · cols + j] over i < rows, for j < n.

    If total is set, out ← the sum of all height elements of part, read as rows of n = TC.
    """
    TC: tl.constexpr = P.TC
    j = tile * P.TC + tl.arange(0, P.TC)
    rows, cols, height = integer(t, F.ROWS), integer(t, F.COLS), integer(t, F.HEIGHT)
    has = j < integer(t, F.N)
    sums = tl.zeros([TC], dtype=tl.float32)
    for k in range(0, rows, P.TR):
        i = k + tl.arange(0, P.TR)
        at = i[:, None].to(tl.int64) * cols + j[None, :]
        ok = (i < rows)[:, None] & has[None, :] & (at < height)
        x = tl.load(pointer(t, F.PART, tl.float32) + at, mask=ok, other=0.0)
        sums += tl.sum(x, axis=0)
    out = pointer(t, F.OUT, tl.float32)
    if integer(t, F.TOTAL) != 0:
        tl.store(out, tl.sum(sums, axis=0))
    else:
        tl.store(out + j, sums, mask=has)


@triton.jit
def factors(t, tile, P: tl.constexpr):
    """Advances row and col of all matrices.

    out ← 1 / sqrt(row / mean(row)), out2 ← 1 / sqrt(col). ``clipped_factors`` multiplies out by
    min(1, clip / RMS); in3 are the weighted sums for the RMS.
    """
    TC: tl.constexpr = P.TC
    mats = integer(t, F.MATS)
    squares = tl.zeros([TC], dtype=tl.float32)
    for mat in range(0, mats):
        mean = _advance_rows(t, mat, TC)
        for c in range(0, integer(t, F.COLS), TC):
            new, at, has = _advance_columns(t, mat, c, TC)
            if P.name == "clipped_factors":
                divided = tl.load(pointer(t, F.IN3, tl.float32) + at, mask=has, other=0.0) / new
                squares += mean * tl.where(has & (new != 0), divided, 0.0)  # 0 / 0 is 0
    if P.name == "clipped_factors":
        ratio = number(t, F.CLIP) / tl.sqrt(tl.sum(squares, axis=0) * number(t, F.A))
        tl.debug_barrier()  # other threads may have stored the values loaded below
        _multiply_rows(t, mats * integer(t, F.ROWS), tl.where(ratio > 1, 1.0, ratio), TC)


@triton.jit
def _advance_rows(t, mat, TC: tl.constexpr):
    """row ← row + lerp · (in / cols + eps − row) of a matrix; returns the mean of row.

    out ← 1 / sqrt(row / mean).
    """
    rows, cols = integer(t, F.ROWS), integer(t, F.COLS)
    k = tl.arange(0, TC)
    sums = tl.zeros([TC], dtype=tl.float32)
    for r in range(0, rows, TC):
        has = r + k < rows
        new = _statistic(t, F.ROW, F.IN, mat * rows + r + k, has, cols.to(tl.float32))
        sums += tl.where(has, new, 0.0)
    mean = tl.sum(sums, axis=0) / rows.to(tl.float32)
    tl.debug_barrier()  # other threads may have stored the values loaded below
    for r in range(0, rows, TC):
        at, has = mat * rows + r + k, r + k < rows
        row = tl.load(pointer(t, F.ROW, tl.float32) + at, mask=has, other=1.0)
        tl.store(pointer(t, F.OUT, tl.float32) + at, _inverse_root(row / mean, row), mask=has)
    return mean


@triton.jit
def _advance_columns(t, mat, c, TC: tl.constexpr):
    """col ← col + lerp · (in2 / rows + eps − col) for columns [c, c + TC) of a matrix.

    out2 ← 1 / sqrt(col). Returns col, the offsets of the columns, and the mask of existing ones.
    """
    rows, cols = integer(t, F.ROWS), integer(t, F.COLS)
    k = c + tl.arange(0, TC)
    at, has = mat * cols + k, k < cols
    new = _statistic(t, F.COL, F.IN2, at, has, rows.to(tl.float32))
    tl.store(pointer(t, F.OUT2, tl.float32) + at, _inverse_root(new, new), mask=has)
    return new, at, has


@triton.jit
def _inverse_root(ratio, v):
    """1 / sqrt(ratio), at most LARGEST_FACTOR; 0 where the statistic v is 0, as then the input is.

    Where ``ratio`` is NaN and v is not 0, it stays NaN.
    """
    found = tl.rsqrt(ratio)
    return tl.where(v == 0, 0.0, tl.where(found > LARGEST_FACTOR, LARGEST_FACTOR, found))


@triton.jit
def _statistic(t, FIELD: tl.constexpr, SUMS: tl.constexpr, at, has, of):
    """Advances a statistic by a mean of ``of`` squares; returns its new value."""
    lerp, eps = number(t, F.LERP), number(t, F.EPS)
    old = tl.load(pointer(t, FIELD, tl.float32) + at, mask=has, other=1.0)
    mean = tl.load(pointer(t, SUMS, tl.float32) + at, mask=has, other=0.0) / of + eps
    mean = tl.where(has, mean, 1.0)
    new = moved(old, mean, lerp)
    tl.store(pointer(t, FIELD, tl.float32) + at, new, mask=has)
    return new


@triton.jit
def _multiply_rows(t, n, ratio, TC: tl.constexpr):
    """out ← out · ratio, n elements."""
    out = pointer(t, F.OUT, tl.float32)
    for k in range(0, n, TC):
        at = k + tl.arange(0, TC)
        tl.store(out + at, tl.load(out + at, mask=at < n, other=0.0) * ratio, mask=at < n)
