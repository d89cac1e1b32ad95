"""The inputs of passes in fp32: evaluates the expressions of ops."""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.moment_kernels import (
    adam,
    adam8_step,
    adam_step,
    moved,
    sign8_step,
    sign_step,
)
from ds_ext.ops.executors.triton.kernels.table_access import (
    BOUND,
    COL,
    COLS,
    DECAY,
    FACTOR,
    LERP1,
    ROW,
    ROWS,
    SCALE,
    M,
    V,
    X,
    hinted,
    integer,
    number,
    pointer,
    run_at,
    size,
)
from ds_ext.ops.executors.triton.kernels.weights import load_weight
from ds_ext.ops.schema import FORMS

# The forms of inputs: see schema.FORMS.
FORM = {name: tl.constexpr(i) for i, name in enumerate(FORMS)}
IS_WEIGHT, IS_RUN, IS_QUOTIENT = FORM["IS_WEIGHT"], FORM["IS_RUN"], FORM["IS_QUOTIENT"]
IS_VECTOR, IS_VECTOR_RESIDUAL = FORM["IS_VECTOR"], FORM["IS_VECTOR_RESIDUAL"]
IS_RESIDUAL, IS_ADAM, IS_ADAM_STEP = FORM["IS_RESIDUAL"], FORM["IS_ADAM"], FORM["IS_ADAM_STEP"]
IS_SIGN_STEP, IS_SIGN8_STEP = FORM["IS_SIGN_STEP"], FORM["IS_SIGN8_STEP"]
IS_ADAM8_STEP = FORM["IS_ADAM8_STEP"]


@triton.jit
def factor_and_bound(t, P: tl.constexpr):
    """The factor of a run, and its bound if BOUNDED."""
    factor = number(t, FACTOR)
    most = factor
    if P.BOUNDED:
        most = number(t, BOUND)
    return factor, most


@triton.jit
def scaled(x, factor, most, P: tl.constexpr):
    """x · factor within ± most, in fp32."""
    u = x.to(tl.float32) * factor
    if P.BOUNDED:
        u = tl.where(u > most, most, tl.where(u < -most, -most, u))
    return u


@triton.jit
def value_of(t, e, ok, mat, top, c, P: tl.constexpr):
    """The input of a pass, [TR, TC] in fp32; undefined outside the run. Some forms advance moments.

    The tile begins at row ``top`` and column c of a matrix. FORM is one of ``schema.FORMS``. SCALES
    multiplies by scale, DECAYS adds decay · weights.
    """
    if P.FORM == IS_WEIGHT:
        u = load_weight(t, e, ok, P)
    else:
        if P.FORM == IS_ADAM:
            u = adam(t, e, ok, P)
        else:
            x = tl.load(run_at(t, X, P.XD, e, P), mask=ok, other=0.0)
            factor, most = factor_and_bound(t, P)
            u = scaled(x, factor, most, P)
        if P.FORM == IS_QUOTIENT or P.FORM == IS_RESIDUAL:
            u = _by_row_and_column(t, u, mat, top, c, P)
        if P.FORM == IS_VECTOR or P.FORM == IS_VECTOR_RESIDUAL:
            v = tl.load(run_at(t, V, tl.float32, e, P), mask=ok, other=1.0)
            inverse = tl.div_rn(tl.full(v.shape, 1.0, tl.float32), tl.sqrt_rn(v))
            u = u * tl.where(v == 0, 0.0, inverse)
        if P.FORM == IS_ADAM_STEP:
            u = adam_step(t, e, ok, u, P)
        if P.FORM == IS_SIGN_STEP:
            u = sign_step(t, e, ok, u, P)
        if P.FORM == IS_ADAM8_STEP:
            u = adam8_step(t, e, ok, u, P)
        if P.FORM == IS_SIGN8_STEP:
            u = sign8_step(t, e, ok, u, P)
        if P.SCALES:
            u = u * number(t, SCALE)
        if P.FORM == IS_RESIDUAL or P.FORM == IS_VECTOR_RESIDUAL:
            u = _subtract_momentum(t, e, ok, u, P)
        if P.DECAYS:
            u = u + number(t, DECAY) * load_weight(t, e, ok, P)
    return u


@triton.jit
def _by_row_and_column(t, u, mat, top, c, P: tl.constexpr):
    """u · row · col for rows [top, top + TR) and columns [c, c + TC) of a matrix."""
    i, k = tl.arange(0, P.TR), tl.arange(0, P.TC)
    first = mat * integer(t, ROWS) + top
    has = i < size(t, ROWS) - top
    row = tl.load(pointer(t, ROW, tl.float32) + first + i, mask=has, other=0.0)
    # without vectors: the factors' alignment depends on other parameters of the batch
    first = mat * integer(t, COLS) + c
    has = hinted(k, P) < size(t, COLS) - c
    col = tl.load(pointer(t, COL, tl.float32) + first + k, mask=has, other=0.0)
    return u * col[None, :] * row[:, None]


@triton.jit
def _subtract_momentum(t, e, ok, u, P: tl.constexpr):
    """u − m, after m ← m + weight · (u − m)."""
    at = run_at(t, M, tl.float32, e, P)
    m = moved(tl.load(at, mask=ok, other=0.0), u, number(t, LERP1))
    tl.store(at, m, mask=ok)
    return u - m
