"""Updates by moments: moments.py, and companding.py for 8-bit moments, on a GPU.

As there, every operation is rounded separately, so codes have the same bits on any device.
"""

import triton
import triton.language as tl

from ds_ext.ops import schema
from ds_ext.ops.executors.triton.kernels.table import (
    LERP1,
    LERP2,
    M_SCALE,
    V_SCALE,
    A,
    B,
    M,
    V,
    number,
    run_at,
    vectors,
)

FEW = tl.constexpr(schema.SCALE_GROUP)  # elements that share a scale
CUT, FIRST = tl.constexpr(schema.SCALE_CUT), tl.constexpr(schema.SCALE_FIRST)
BELOW = tl.constexpr(2 ** (schema.SCALE_CUT - 1) - 1)  # just below half of the dropped bits
LEAST, MOST = tl.constexpr(schema.MIN_SCALE), tl.constexpr(schema.MAX_SCALE)


@triton.jit
def moved(m, x, weight):
    """m + weight · (x − m), as ``moments.moved``."""
    change = x - m
    return tl.where(weight < 0.5, m + weight * change, x - (1.0 - weight) * change)


@triton.jit
def root_quotient(t, m, root):
    """m / (root · a + b), where ``root`` is the root of v."""
    return tl.div_rn(m, root * number(t, A) + number(t, B))


@triton.jit
def adam(t, e, ok, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Adam's update by m and v."""
    m = tl.load(run_at(t, M, tl.float32, e, TC, ALIGNED), mask=ok, other=0.0)
    v = tl.load(run_at(t, V, tl.float32, e, TC, ALIGNED), mask=ok, other=1.0)
    return root_quotient(t, m, tl.sqrt_rn(v))


@triton.jit
def adam_step(t, e, ok, g, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """``adam``, after the gradient g has advanced m and v."""
    at_m = run_at(t, M, tl.float32, e, TC, ALIGNED)
    at_v = run_at(t, V, tl.float32, e, TC, ALIGNED)
    m = moved(tl.load(at_m, mask=ok, other=0.0), g, number(t, LERP1))
    v = moved(tl.load(at_v, mask=ok, other=1.0), g * g, number(t, LERP2))
    tl.store(at_m, m, mask=ok)
    tl.store(at_v, v, mask=ok)
    return root_quotient(t, m, tl.sqrt_rn(v))


@triton.jit
def adam8_step(t, e, ok, g, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """``adam_step`` with 8-bit moments; the update uses them before they are rounded."""
    m = moved(_signed(t, e, ok, TR, TC, ALIGNED), g, number(t, LERP1))
    v = moved(_squares(t, e, ok, TR, TC, ALIGNED), g * g, number(t, LERP2))
    root = tl.sqrt_rn(v)
    _store_signed(t, e, ok, m, TR, TC, ALIGNED)
    _store_roots(t, e, ok, root, TR, TC, ALIGNED)
    return root_quotient(t, m, root)


@triton.jit
def sign_step(t, e, ok, g, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Lion's update, the sign of m + lerp1 · (g − m); then m ← m + lerp2 · (g − m)."""
    at = run_at(t, M, tl.float32, e, TC, ALIGNED)
    m = tl.load(at, mask=ok, other=0.0)
    tl.store(at, moved(m, g, number(t, LERP2)), mask=ok)
    return _sign(moved(m, g, number(t, LERP1)))


@triton.jit
def sign8_step(t, e, ok, g, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """``sign_step`` with an 8-bit momentum."""
    m = _signed(t, e, ok, TR, TC, ALIGNED)
    _store_signed(t, e, ok, moved(m, g, number(t, LERP2)), TR, TC, ALIGNED)
    return _sign(moved(m, g, number(t, LERP1)))


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def _signed(t, e, ok, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Decodes m like companding.SignedGroups; 0 outside the run."""
    code = tl.load(run_at(t, M, tl.int8, e, TC, ALIGNED), mask=ok, other=0).to(tl.float32)
    at = _scales_at(t, M_SCALE, e, TC, ALIGNED)
    scale = _of_each(_scale(at, _groups(ok, TR, TC)), TR, TC)
    return tl.div_rn(code, 254.0 - tl.abs(code)) * scale


@triton.jit
def _store_signed(t, e, ok, m, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Encodes m like companding.SignedGroups, [TR, TC]; m is 0 outside the run."""
    most = _largest(m, TR, TC)
    _store_scale(_scales_at(t, M_SCALE, e, TC, ALIGNED), most, _groups(ok, TR, TC))
    y = tl.div_rn(m * 254.0, tl.abs(m) + _of_each(most, TR, TC)) + 0.5
    code = tl.minimum(tl.maximum(tl.floor(y), -127.0), 127.0).to(tl.int8)
    tl.store(run_at(t, M, tl.int8, e, TC, ALIGNED), code, mask=ok)


@triton.jit
def _squares(t, e, ok, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Decodes v like companding.SquareGroups; 0 outside the run."""
    code = tl.load(run_at(t, V, tl.uint8, e, TC, ALIGNED), mask=ok, other=0).to(tl.float32)
    scale = _scale(_scales_at(t, V_SCALE, e, TC, ALIGNED), _groups(ok, TR, TC))
    root = code * _of_each(tl.div_rn(scale, tl.full(scale.shape, 255.0, tl.float32)), TR, TC)
    return root * root


@triton.jit
def _store_roots(t, e, ok, root, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Encodes v from its roots like companding.SquareGroups."""
    most = _largest(root, TR, TC)
    _store_scale(_scales_at(t, V_SCALE, e, TC, ALIGNED), most, _groups(ok, TR, TC))
    steps = _of_each(tl.div_rn(tl.full(most.shape, 255.0, tl.float32), most), TR, TC)
    code = tl.minimum(tl.maximum(tl.floor(root * steps + 0.5), 0.0), 255.0)
    tl.store(run_at(t, V, tl.uint8, e, TC, ALIGNED), code.to(tl.uint8), mask=ok)


@triton.jit
def _scales_at(t, FIELD: tl.constexpr, e, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the scales of a tile whose rows begin at e, a multiple of TC: [TR, groups]."""
    first = e // TC * (TC // FEW)
    return vectors(t, FIELD, tl.int16, ALIGNED) + first + tl.arange(0, TC // FEW)[None, :]


@triton.jit
def _scale(at, has):
    """Decodes 16-bit scales like companding.scales; the smallest scale where there is no group."""
    bits = (tl.load(at, mask=has, other=0).to(tl.int32) & 0xFFFF) + FIRST
    return (bits << CUT).to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(at, scale, has):
    """Encodes scales like companding.scale_codes: rounded to nearest, ties to even."""
    bits = scale.to(tl.int32, bitcast=True)
    rounded = (bits + BELOW + ((bits >> CUT) & 1)) >> CUT
    tl.store(at, (rounded - FIRST).to(tl.int16), mask=has)


@triton.jit
def _largest(x, TR: tl.constexpr, TC: tl.constexpr):
    """The scale of each group: its largest magnitude, clamped."""
    most = tl.max(tl.reshape(tl.abs(x), [TR, TC // FEW, FEW]), axis=2)
    return tl.minimum(tl.maximum(most, LEAST), MOST)


@triton.jit
def _groups(ok, TR: tl.constexpr, TC: tl.constexpr):
    """Mask of the groups that have elements of the run, [TR, groups]."""
    return tl.max(tl.reshape(ok.to(tl.int32), [TR, TC // FEW, FEW]), axis=2) > 0


@triton.jit
def _of_each(x, TR: tl.constexpr, TC: tl.constexpr):
    """Repeats each group's number for its elements, [TR, groups] -> [TR, TC]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [TR, TC // FEW, FEW]), [TR, TC])
