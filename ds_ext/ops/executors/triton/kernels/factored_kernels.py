"""Factored second moments: advances their statistics, and computes inverse roots of factors."""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.sums import LARGEST_FACTOR
from ds_ext.ops.executors.triton.kernels.table_access import (
    CLIP,
    COL,
    COLS,
    EPS,
    IN,
    IN2,
    IN3,
    LERP,
    MATS,
    OUT,
    OUT2,
    ROW,
    ROWS,
    A,
    integer,
    number,
    pointer,
)
from ds_ext.ops.executors.triton.kernels.values import moved


@triton.jit
def factors(t, tile, P: tl.constexpr):
    """Advances row and col of all matrices.

    out ← 1 / sqrt(row / mean(row)), out2 ← 1 / sqrt(col). ``clipped_factors`` multiplies out by
    min(1, clip / RMS); in3 are the weighted sums for the RMS.
    """
    TC: tl.constexpr = P.TC
    mats = integer(t, MATS)
    squares = tl.zeros([TC], dtype=tl.float32)
    for mat in range(0, mats):
        mean = _advance_rows(t, mat, TC)
        for c in range(0, integer(t, COLS), TC):
            new, at, has = _advance_columns(t, mat, c, TC)
            if P.name == "clipped_factors":
                divided = tl.load(pointer(t, IN3, tl.float32) + at, mask=has, other=0.0) / new
                squares += mean * tl.where(has & (new != 0), divided, 0.0)  # 0 / 0 is 0
    if P.name == "clipped_factors":
        ratio = number(t, CLIP) / tl.sqrt(tl.sum(squares, axis=0) * number(t, A))
        tl.debug_barrier()  # other threads may have stored the values loaded below
        _multiply_rows(t, mats * integer(t, ROWS), tl.where(ratio > 1, 1.0, ratio), TC)


@triton.jit
def _advance_rows(t, mat, TC: tl.constexpr):
    """row ← row + lerp · (in / cols + eps − row) of a matrix; returns the mean of row.

    out ← 1 / sqrt(row / mean).
    """
    rows, cols = integer(t, ROWS), integer(t, COLS)
    k = tl.arange(0, TC)
    sums = tl.zeros([TC], dtype=tl.float32)
    for r in range(0, rows, TC):
        has = r + k < rows
        new = _statistic(t, ROW, IN, mat * rows + r + k, has, cols.to(tl.float32))
        sums += tl.where(has, new, 0.0)
    mean = tl.sum(sums, axis=0) / rows.to(tl.float32)
    tl.debug_barrier()  # other threads may have stored the values loaded below
    for r in range(0, rows, TC):
        at, has = mat * rows + r + k, r + k < rows
        row = tl.load(pointer(t, ROW, tl.float32) + at, mask=has, other=1.0)
        tl.store(pointer(t, OUT, tl.float32) + at, _inverse_root(row / mean, row), mask=has)
    return mean


@triton.jit
def _advance_columns(t, mat, c, TC: tl.constexpr):
    """col ← col + lerp · (in2 / rows + eps − col) for columns [c, c + TC) of a matrix.

    out2 ← 1 / sqrt(col). Returns col, the offsets of the columns, and the mask of existing ones.
    """
    rows, cols = integer(t, ROWS), integer(t, COLS)
    k = c + tl.arange(0, TC)
    at, has = mat * cols + k, k < cols
    new = _statistic(t, COL, IN2, at, has, rows.to(tl.float32))
    tl.store(pointer(t, OUT2, tl.float32) + at, _inverse_root(new, new), mask=has)
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
    lerp, eps = number(t, LERP), number(t, EPS)
    old = tl.load(pointer(t, FIELD, tl.float32) + at, mask=has, other=1.0)
    mean = tl.load(pointer(t, SUMS, tl.float32) + at, mask=has, other=0.0) / of + eps
    mean = tl.where(has, mean, 1.0)
    new = moved(old, mean, lerp)
    tl.store(pointer(t, FIELD, tl.float32) + at, new, mask=has)
    return new


@triton.jit
def _multiply_rows(t, n, ratio, TC: tl.constexpr):
    """out ← out · ratio, n elements."""
    out = pointer(t, OUT, tl.float32)
    for k in range(0, n, TC):
        at = k + tl.arange(0, TC)
        tl.store(out + at, tl.load(out + at, mask=at < n, other=0.0) * ratio, mask=at < n)
