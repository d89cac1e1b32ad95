"""The inputs of passes in fp32: evaluates the expressions of ops, and advances moments.

As in moments.py and companding.py, every operation on moments is rounded separately, so codes of 8
bits are the same on any device.
"""

import triton
import triton.language as tl

from ds_ext.ops import schema
from ds_ext.ops.executors.triton.kernels import fields as F
from ds_ext.ops.executors.triton.kernels.table_access import (
    INTERPRETED,
    hinted,
    integer,
    number,
    pointer,
    run_at,
    size,
    vectors,
)
from ds_ext.ops.executors.triton.kernels.weights import load_weight

GROUP = tl.constexpr(schema.SCALE_GROUP)  # elements that share a scale
CUT, FIRST = tl.constexpr(schema.SCALE_CUT), tl.constexpr(schema.SCALE_FIRST)
BELOW = tl.constexpr(2 ** (schema.SCALE_CUT - 1) - 1)  # just below half of the dropped bits
MIN_SCALE, MAX_SCALE = tl.constexpr(schema.MIN_SCALE), tl.constexpr(schema.MAX_SCALE)
LEAST_ROOT, LEAST_SQUARE = tl.constexpr(schema.MIN_ROOT_SCALE), tl.constexpr(schema.MIN_SQUARE)
LEAST_MOMENT = tl.constexpr(schema.MIN_MOMENT)
MOST_DIVISOR = tl.constexpr(2.0**125)  # of a finite v


@triton.jit
def factor_and_bound(t, P: tl.constexpr):
    """The factor of a run, and its bound if BOUNDED."""
    factor = number(t, F.FACTOR)
    most = factor
    if P.BOUNDED:
        most = number(t, F.BOUND)
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
    if P.FORM == F.IS_WEIGHT:
        u = load_weight(t, e, ok, P)
    else:
        if P.FORM == F.IS_ADAM:
            u = adam(t, e, ok, P)
        else:
            x = tl.load(run_at(t, F.X, P.XD, e, P), mask=ok, other=0.0)
            factor, most = factor_and_bound(t, P)
            u = scaled(x, factor, most, P)
        if P.FORM == F.IS_QUOTIENT or P.FORM == F.IS_RESIDUAL:
            u = _by_row_and_column(t, u, mat, top, c, P)
        if P.FORM == F.IS_VECTOR:
            v = tl.load(run_at(t, F.V, tl.float32, e, P), mask=ok, other=1.0)
            inverse = tl.div_rn(tl.full(v.shape, 1.0, tl.float32), tl.sqrt_rn(v))
            u = u * tl.where(v == 0, 0.0, inverse)
        if P.FORM == F.IS_ADAM_STEP:
            u = adam_step(t, e, ok, u, P)
        if P.FORM == F.IS_SIGN_STEP:
            u = sign_step(t, e, ok, u, P)
        if P.FORM == F.IS_ADAM8_STEP:
            u = adam8_step(t, e, ok, u, P)
        if P.FORM == F.IS_SIGN8_STEP:
            u = sign8_step(t, e, ok, u, P)
        if P.SCALES:
            u = u * number(t, F.SCALE)
        if P.FORM == F.IS_RESIDUAL:
            u = _subtract_momentum(t, e, ok, u, P)
        if P.DECAYS:
            u = u + number(t, F.DECAY) * load_weight(t, e, ok, P)
    return u


@triton.jit
def _by_row_and_column(t, u, mat, top, c, P: tl.constexpr):
    """u · row · col for rows [top, top + TR) and columns [c, c + TC) of a matrix."""
    i, k = tl.arange(0, P.TR), tl.arange(0, P.TC)
    first = mat * integer(t, F.ROWS) + top
    has = i < size(t, F.ROWS) - top
    row = tl.load(pointer(t, F.ROW, tl.float32) + first + i, mask=has, other=0.0)
    # without vectors: the factors' alignment depends on other parameters of the batch
    first = mat * integer(t, F.COLS) + c
    has = hinted(k, P) < size(t, F.COLS) - c
    col = tl.load(pointer(t, F.COL, tl.float32) + first + k, mask=has, other=0.0)
    return u * col[None, :] * row[:, None]


@triton.jit
def _subtract_momentum(t, e, ok, u, P: tl.constexpr):
    """u − m, after m ← m + weight · (u − m)."""
    at = run_at(t, F.M, tl.float32, e, P)
    m = moved(tl.load(at, mask=ok, other=0.0), u, number(t, F.LERP1))
    tl.store(at, m, mask=ok)
    return u - m


@triton.jit
def moved(m, x, weight):
    """m + weight · (x − m), as ``moments.moved``: the nearer end moves."""
    near = weight < 0.5
    return tl.where(near, m, x) + tl.where(near, weight, weight - 1.0) * (x - m)


@triton.jit
def _near_reciprocal(x):
    """1 / x with an error of at most one unit in the last place."""
    if INTERPRETED:
        found = 1.0 / x
    else:
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def _reciprocal(x):
    """1 / x, correctly rounded, for x from 2^-126 to 2^125.

    In this range ``rcp.rn.f32`` has the same instructions; elsewhere it calls a function.
    """
    near = _near_reciprocal(x)
    return tl.fma(tl.fma(-x, near, 1.0), near, near)


@triton.jit
def _root(x):
    """The root of x, correctly rounded, for x from 2^-101 on; NaN for infinity.

    In this range ``sqrt.rn.f32`` has the same instructions; elsewhere it calls a function.
    """
    near = tl.rsqrt(x)
    root = x * near
    return tl.fma(tl.fma(-root, root, x), 0.5 * near, root)


@triton.jit
def _quotient(x, y):
    """x / y; correctly rounded if it is not within 2^-21 ulp of the middle of two numbers."""
    return _corrected(x, y, _near_reciprocal(y))


@triton.jit
def _corrected(x, y, reciprocal):
    """x / y: correctly rounded if ``reciprocal`` is 1 / y correctly rounded (Markstein)."""
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, y, x), reciprocal, quotient)


@triton.jit
def root_quotient(t, m, root):
    """m / (root · a + b), where ``root`` is the root of v; 0 where the divisor is 0."""
    divisor = root * number(t, F.A) + number(t, F.B)
    return tl.where(divisor == 0, 0.0, tl.div_rn(m, divisor))


@triton.jit
def adam(t, e, ok, P: tl.constexpr):
    """Adam's update by m and v."""
    m = tl.load(run_at(t, F.M, tl.float32, e, P), mask=ok, other=0.0)
    v = tl.load(run_at(t, F.V, tl.float32, e, P), mask=ok, other=1.0)
    return root_quotient(t, m, tl.sqrt_rn(v))


@triton.jit
def adam_step(t, e, ok, g, P: tl.constexpr):
    """``adam``, after the gradient g has advanced m and v."""
    at_m = run_at(t, F.M, tl.float32, e, P)
    at_v = run_at(t, F.V, tl.float32, e, P)
    m = moved(tl.load(at_m, mask=ok, other=0.0), g, number(t, F.LERP1))
    v = moved(tl.load(at_v, mask=ok, other=1.0), g * g, number(t, F.LERP2))
    tl.store(at_m, m, mask=ok)
    tl.store(at_v, v, mask=ok)
    return root_quotient(t, m, tl.sqrt_rn(v))


@triton.jit
def adam8_step(t, e, ok, g, P: tl.constexpr):
    """``adam_step`` with 8-bit moments; the update uses them before they are rounded."""
    m = moved(_signed(t, e, ok, P), g, number(t, F.LERP1))
    v = moved(_squares(t, e, ok, P), g * g, number(t, F.LERP2))
    m = tl.where(tl.abs(m) < LEAST_MOMENT, 0.0, m)
    v = tl.maximum(v, LEAST_SQUARE)
    root = _root(v)
    _store_signed(t, e, ok, m, P)
    _store_roots(t, e, ok, v, root, P)
    divisor = root * number(t, F.A) + number(t, F.B)
    return tl.where(divisor < MOST_DIVISOR, _corrected(m, divisor, _reciprocal(divisor)), 0.0)


@triton.jit
def sign_step(t, e, ok, g, P: tl.constexpr):
    """Lion's update, the sign of m + lerp1 · (g − m); then m ← m + lerp2 · (g − m)."""
    at = run_at(t, F.M, tl.float32, e, P)
    m = tl.load(at, mask=ok, other=0.0)
    tl.store(at, moved(m, g, number(t, F.LERP2)), mask=ok)
    return _sign(moved(m, g, number(t, F.LERP1)))


@triton.jit
def sign8_step(t, e, ok, g, P: tl.constexpr):
    """``sign_step`` with an 8-bit momentum."""
    m = _signed(t, e, ok, P)
    _store_signed(t, e, ok, moved(m, g, number(t, F.LERP2)), P)
    return _sign(moved(m, g, number(t, F.LERP1)))


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def _signed(t, e, ok, P: tl.constexpr):
    """Decodes m like companding.SignedGroups; 0 outside the run."""
    code = tl.load(run_at(t, F.M, tl.int8, e, P), mask=ok, other=0).to(tl.float32)
    scale = _of_each(_load_scale(t, F.M_SCALE, e, P), P)
    # exact: a quotient of small integers is not near the middle of two numbers
    return _quotient(code, 254.0 - tl.abs(code)) * scale


@triton.jit
def _store_signed(t, e, ok, m, P: tl.constexpr):
    """Encodes m like companding.SignedGroups, [TR, TC]; m is 0 outside the run."""
    scale = tl.minimum(tl.maximum(_largest(tl.abs(m), P), MIN_SCALE), MAX_SCALE)
    _store_scale(t, F.M_SCALE, e, scale, P)
    x = tl.minimum(tl.maximum(m * _of_each(_reciprocal(scale), P), -1.0), 1.0)
    y = _quotient(254.0 * x, 1.0 + tl.abs(x))
    code = (y + 1.5 * 2.0**23).to(tl.int32, bitcast=True).to(tl.int8)  # to nearest, ties to even
    tl.store(run_at(t, F.M, tl.int8, e, P), code, mask=ok)


@triton.jit
def _squares(t, e, ok, P: tl.constexpr):
    """Decodes v like companding.SquareGroups; 0 outside the run."""
    code = tl.load(run_at(t, F.V, tl.uint8, e, P), mask=ok, other=0).to(tl.float32)
    scale = _load_scale(t, F.V_SCALE, e, P)
    step = _quotient(scale, tl.full(scale.shape, 255.0, tl.float32))
    root = code * _of_each(step, P)
    return root * root


@triton.jit
def _store_roots(t, e, ok, v, root, P: tl.constexpr):
    """Encodes v like companding.SquareGroups; its roots are NaN for infinity."""
    most = _largest(v, P)
    scale = _root(tl.minimum(tl.maximum(most, LEAST_ROOT * LEAST_ROOT), MAX_SCALE * MAX_SCALE))
    _store_scale(t, F.V_SCALE, e, scale, P)
    x = root * _of_each(_reciprocal(scale) * 255.0, P)
    code = (tl.minimum(x, 255.0) + 0.5).to(tl.int32).to(tl.uint8)  # cut off, as floor
    tl.store(run_at(t, F.V, tl.uint8, e, P), code, mask=ok)


@triton.jit
def _scales_at(t, FIELD: tl.constexpr, e, P: tl.constexpr):
    """Pointers to the scales of a flat tile, [TR, groups], and the mask of those of the run.

    The rows of a flat tile begin at e, a multiple of TC, in a run of n elements.
    """
    group = tl.arange(0, P.TC // GROUP)[None, :]
    at = vectors(t, FIELD, tl.int16, P) + e // P.TC * (P.TC // GROUP) + group
    return at, e + group * GROUP < integer(t, F.N)


@triton.jit
def _load_scale(t, FIELD: tl.constexpr, e, P: tl.constexpr):
    """Decodes 16-bit scales like companding.scales; the smallest scale where there is no group."""
    at, has = _scales_at(t, FIELD, e, P)
    bits = (tl.load(at, mask=has, other=0).to(tl.int32) & 0xFFFF) + FIRST
    return (bits << CUT).to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(t, FIELD: tl.constexpr, e, scale, P: tl.constexpr):
    """Encodes scales like companding.scale_codes: rounded to nearest, ties to even."""
    at, has = _scales_at(t, FIELD, e, P)
    bits = scale.to(tl.int32, bitcast=True)
    rounded = (bits + BELOW + ((bits >> CUT) & 1)) >> CUT
    tl.store(at, (rounded - FIRST).to(tl.int16), mask=has)


@triton.jit
def _largest(x, P: tl.constexpr):
    """The largest number of each group, [TR, TC] -> [TR, groups]."""
    return tl.max(tl.reshape(x, [P.TR, P.TC // GROUP, GROUP]), axis=2)


@triton.jit
def _of_each(x, P: tl.constexpr):
    """Repeats each group's number for its elements, [TR, groups] -> [TR, TC]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [P.TR, P.TC // GROUP, GROUP]), [P.TR, P.TC])
