"""What a pass reads, in fp32: the formulas of lazy.py and momenta.py, as they are read."""

import triton
import triton.language as tl

from ds_ext.ops.triton.kernels.table import (
    BETA1,
    BETA2,
    BOUND,
    COL,
    COLS,
    DECAY,
    FACTOR,
    ROW,
    ROWS,
    SCALE,
    WEIGHT,
    A,
    B,
    M,
    V,
    X,
    hinted,
    number,
    pointer,
    run_at,
)
from ds_ext.ops.triton.kernels.weights import load_weight

# What is read: see ``value_of``.
IS_WEIGHT, IS_RUN, IS_QUOTIENT, IS_VECTOR = (tl.constexpr(i) for i in range(4))
IS_RESIDUAL, IS_ADAM_STEP, IS_ADAM, IS_SIGN_STEP = (tl.constexpr(i) for i in range(4, 8))


@triton.jit
def factor_and_bound(t, BOUNDED: tl.constexpr):
    """What a run is multiplied by, and its bound if it has one."""
    factor = number(t, FACTOR)
    most = factor
    if BOUNDED:
        most = number(t, BOUND)
    return factor, most


@triton.jit
def scaled(x, factor, most, BOUNDED: tl.constexpr):
    """x · factor within ± most, in fp32."""
    u = x.to(tl.float32) * factor
    if BOUNDED:
        u = tl.where(u > most, most, tl.where(u < -most, -most, u))
    return u


@triton.jit
def value_of(
    t, e, ok, mat, r, has_row, j, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What a pass reads, [TR, TC] in fp32; 0 outside of the run. Moments are advanced by it.

    IS_WEIGHT: the weights. IS_RUN: x · factor within ± bound. IS_QUOTIENT: that · row · col;
    IS_VECTOR: / sqrt(v), a run. IS_ADAM: from m and v; IS_ADAM_STEP: after they were advanced by
    x. IS_SIGN_STEP: Lion's. All · scale. IS_RESIDUAL: the quotient less the momentum. DECAYS: +
    decay · weights.
    """
    if FORM == IS_WEIGHT:
        u = load_weight(t, e, ok, TC, ALIGNED, WD, KEPT)
    else:
        if FORM == IS_ADAM:
            u = _adam(t, e, ok, TC, ALIGNED)
        else:
            x = tl.load(run_at(t, X, XD, e, TC, ALIGNED), mask=ok, other=0.0)
            factor, most = factor_and_bound(t, BOUNDED)
            u = scaled(x, factor, most, BOUNDED)
        if FORM == IS_QUOTIENT or FORM == IS_RESIDUAL:
            u = _by_row_and_column(t, u, mat, r, has_row, j, ALIGNED)
        if FORM == IS_VECTOR:
            u = u * tl.rsqrt(tl.load(run_at(t, V, tl.float32, e, TC, ALIGNED), mask=ok, other=1.0))
        if FORM == IS_ADAM_STEP:
            u = _adam_step(t, e, ok, u, TC, ALIGNED)
        if FORM == IS_SIGN_STEP:
            u = _sign_step(t, e, ok, u, TC, ALIGNED)
        u = u * number(t, SCALE)
        if FORM == IS_RESIDUAL:
            u = _less_momentum(t, e, ok, u, TC, ALIGNED)
        if DECAYS:
            u = u + number(t, DECAY) * load_weight(t, e, ok, TC, ALIGNED, WD, KEPT)
    return tl.where(ok, u, 0.0)


@triton.jit
def _by_row_and_column(t, u, mat, r, has_row, j, ALIGNED: tl.constexpr):
    """u · row · col, of rows r and columns j of a matrix."""
    rows, cols = tl.load(t + ROWS), hinted(tl.load(t + COLS), ALIGNED)
    row = tl.load(pointer(t, ROW, tl.float32) + mat * rows + r, mask=has_row, other=0.0)
    # without vectors: where factors lie depends on the parameters beside this one
    col = tl.load(pointer(t, COL, tl.float32) + mat * cols + j, mask=j < cols, other=0.0)
    return u * col[None, :] * row[:, None]


@triton.jit
def _less_momentum(t, e, ok, u, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """u − m, after m ← m + weight · (u − m)."""
    at = run_at(t, M, tl.float32, e, TC, ALIGNED)
    m = tl.load(at, mask=ok, other=0.0)
    m += number(t, WEIGHT) * (u - m)
    tl.store(at, m, mask=ok)
    return u - m


@triton.jit
def _adam(t, e, ok, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Adam's update by m and v."""
    m = tl.load(run_at(t, M, tl.float32, e, TC, ALIGNED), mask=ok, other=0.0)
    v = tl.load(run_at(t, V, tl.float32, e, TC, ALIGNED), mask=ok, other=1.0)
    return _root_quotient(t, m, v)


@triton.jit
def _adam_step(t, e, ok, g, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """The same, after m and v were advanced by a gradient."""
    at_m = run_at(t, M, tl.float32, e, TC, ALIGNED)
    at_v = run_at(t, V, tl.float32, e, TC, ALIGNED)
    m = tl.load(at_m, mask=ok, other=0.0)
    v = tl.load(at_v, mask=ok, other=1.0)
    m += number(t, BETA1) * (g - m)
    v += number(t, BETA2) * (g * g - v)
    tl.store(at_m, m, mask=ok)
    tl.store(at_v, v, mask=ok)
    return _root_quotient(t, m, v)


@triton.jit
def _sign_step(t, e, ok, g, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Lion's: the sign of m + beta1 · (g − m), after which m was advanced by beta2."""
    at = run_at(t, M, tl.float32, e, TC, ALIGNED)
    m = tl.load(at, mask=ok, other=0.0)
    u = m + number(t, BETA1) * (g - m)
    tl.store(at, m + number(t, BETA2) * (g - m), mask=ok)
    return tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, u))


@triton.jit
def _root_quotient(t, m, v):
    """m / (sqrt(v) · a + b)."""
    return m / (tl.sqrt(v) * number(t, A) + number(t, B))
