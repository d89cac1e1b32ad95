"""Reads and writes weights: sixteen_bit.py on a GPU, with the same random numbers."""

import triton
import triton.language as tl

from ds_ext.ops import schema
from ds_ext.ops.executors.triton.kernels import fields as F
from ds_ext.ops.executors.triton.kernels.table_access import (
    INTERPRETED,
    address,
    hinted,
    integer,
    run_at,
    vectors,
)

MOST_BF16 = tl.constexpr(3.3895313892515355e38)
MOST_FP16 = tl.constexpr(65504.0)
LEVELS, HALF = tl.constexpr(schema.ERROR_LEVELS), tl.constexpr(schema.HALF)
MAX_CODE = tl.constexpr(schema.MAX_ERROR_CODE)
MAX_INWARD = tl.constexpr(schema.MAX_INWARD_CODE)
SHIFTS, PRIME3 = tl.constexpr(schema.NOISE_SHIFTS), tl.constexpr(schema.PRIME3)
LOWBIAS1, LOWBIAS2 = tl.constexpr(schema.LOWBIAS1), tl.constexpr(schema.LOWBIAS2)


@triton.jit
def load_weight(t, e, ok, P: tl.constexpr):
    """Loads weights as fp32."""
    if P.STORAGE == F.SPLIT:
        upper = tl.load(run_at(t, F.W, tl.int16, e, P), mask=ok, other=0).to(tl.int32)
        rest = tl.load(run_at(t, F.AUX, tl.int16, e, P), mask=ok, other=0).to(tl.int32)
        x = ((upper << 16) + rest).to(tl.float32, bitcast=True)
        x = tl.where(x == x, x, (upper << 16).to(tl.float32, bitcast=True))
    else:
        run = tl.load(run_at(t, F.W, P.WD, e, P), mask=ok, other=0.0)
        x = run.to(tl.float32)
        if P.STORAGE == F.COPIED:
            copy = tl.load(run_at(t, F.AUX, tl.float32, e, P), mask=ok, other=0.0)
            x = tl.where(copy.to(P.WD) == run, copy, x)
        if P.STORAGE == F.CORRECTED:
            parts = tl.load(run_at(t, F.AUX, tl.int8, e, P), mask=ok, other=0)
            x = _corrected(x, parts, P.WD)
    return x


@triton.jit
def _corrected(x, parts, WD: tl.constexpr):
    """The value of a weight x, in fp32, and its rounding error in int8."""
    least: tl.constexpr = 0x00800000 if WD == tl.bfloat16 else 0x38800000
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_power = ((size & 0x007FFFFF) == 0) & (size > least)
    inward = tl.where(is_power, MAX_INWARD, MAX_CODE)
    low, high = tl.where(x < 0, -MAX_CODE, -inward), tl.where(x < 0, inward, MAX_CODE)
    parts = tl.minimum(tl.maximum(parts.to(tl.float32), low), high)
    epsilon: tl.constexpr = 2.0**-7 if WD == tl.bfloat16 else 2.0**-10
    return x + parts * (epsilon / (2 * LEVELS)) * _power(x, WD).to(tl.float32, bitcast=True)


@triton.jit
def store_weight(t, e, ok, new, P: tl.constexpr):
    """Stores fp32 weights: see sixteen_bit.py and rounding.py.

    Returns what ``load_weight`` would load.
    """
    w = run_at(t, F.W, P.WD, e, P)
    if P.STORAGE == F.SPLIT:
        bits = new.to(tl.int32, bitcast=True)
        bits = tl.where(new != new, 0x7FC00000, bits)
        upper = ((bits + 0x8000) >> 16).to(tl.int16)
        tl.store(run_at(t, F.AUX, tl.int16, e, P), bits.to(tl.int16), mask=ok)
        tl.store(w, upper.to(P.WD, bitcast=True), mask=ok)
        held = new
    elif P.STORAGE == F.CORRECTED:
        near = _to_nearest(new, P.WD)
        parts = _parts(new, near, P.WD)
        tl.store(run_at(t, F.AUX, tl.int8, e, P), parts, mask=ok)
        tl.store(w, near, mask=ok)
        held = _corrected(near.to(tl.float32), parts, P.WD)
    elif P.STORAGE == F.COPIED:
        tl.store(run_at(t, F.AUX, tl.float32, e, P), new, mask=ok)
        tl.store(w, new.to(P.WD), mask=ok)
        held = new
    elif P.STORAGE == F.STOCHASTIC:
        noise = _noise(t, e, P)
        if P.WD == tl.bfloat16:
            held = _to_bf16(new, noise)
        else:
            held = tl.where(_is_finite(new), _to_fp16(new, noise), new)
        tl.store(w, held.to(P.WD), mask=ok)
    else:
        near = _to_nearest(new, P.WD)
        tl.store(w, near, mask=ok)
        held = near.to(tl.float32)
    return held


@triton.jit
def _parts(new, held, WD: tl.constexpr):
    """The rounding error in int8: parts of half the spacing of the weight's dtype."""
    near = held.to(tl.float32)
    epsilon: tl.constexpr = 2.0**-7 if WD == tl.bfloat16 else 2.0**-10
    inverse = (0x7F800000 - _power(near, WD)).to(tl.float32, bitcast=True)
    parts = (new - near) * inverse * (LEVELS / epsilon)
    parts = tl.where(_is_finite(near), parts, 0.0)
    return tl.where(parts < 0, parts - HALF, parts + HALF).to(tl.int32).to(tl.int8)


@triton.jit
def _power(near, WD: tl.constexpr):
    """The bits of the power of two below a weight, at least the smallest normal number."""
    least: tl.constexpr = 0x00800000 if WD == tl.bfloat16 else 0x38800000
    bits = near.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, least), 0x7F000000)


@triton.jit
def _to_bf16(x, noise):
    """Rounds fp32 up or down to bf16 by noise in [0, 2**16).

    Cutting off is right for numbers beyond the largest bf16, and for NaNs, whose upper half has a
    bit of the fraction set if an operation made them.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(x) <= MOST_BF16, bits + noise, bits) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_fp16(x, noise):
    """Rounds fp32 up or down to fp16 by noise in [0, 2**16)."""
    bounded = tl.minimum(tl.maximum(x, -MOST_FP16), MOST_FP16)
    power = (bounded.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    spacing = tl.maximum(power, 2.0**-14) * 2.0**-10
    steps = tl.div_rn(tl.abs(bounded), spacing)
    whole = steps.to(tl.int32).to(tl.float32)
    cut = ((steps - whole) * 65536.0).to(tl.int32)
    whole += (noise < cut).to(tl.float32)
    return tl.where(bounded < 0, -whole, whole) * spacing


@triton.jit
def place(key, chunk):
    """rounding.place: the position in the permutation at which a chunk's noise starts."""
    h = (key + chunk * PRIME3).to(tl.uint32)  # of the lower bits of the key
    h = (h ^ (h >> 16)) * LOWBIAS1
    h = (h ^ (h >> 15)) * LOWBIAS2
    return h ^ (h >> 16)


@triton.jit
def flips(key):
    """The bits that a step flips in the numbers of the permutation."""
    return (key >> 32).to(tl.int32)


@triton.jit
def _noise(t, e, P: tl.constexpr):
    """The noise of rounding.add_noise_: numbers in [0, 2**16) that depend on (key, element) alone.

    All elements of a vector are in one chunk of 2**16 elements, because runs count as aligned only
    if their origins are. One row of the table has the vector's numbers at an aligned address.
    """
    k = tl.arange(0, P.TC)[None, :]
    first = hinted(e + integer(t, F.ORIGIN), P) + hinted(k, P)
    key = address(t, F.KEY)
    position = (place(key, first >> 16) + first.to(tl.uint32)) & 0xFFFF
    at = position % SHIFTS * (2 * 0x10000) + position // SHIFTS * SHIFTS
    if P.ALIGNED:  # the hint says what the compiler loses in the hash
        at = tl.max_constancy(at, [1, 16]) + k % 16
    return tl.load(vectors(t, F.NOISE, tl.uint16, P) + at).to(tl.int32) ^ flips(key)


@triton.jit
def _is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def _to_nearest(x, WD: tl.constexpr):
    """Rounds fp32 to a weight's dtype, ties to even; Triton's interpreter truncates to bf16."""
    if WD == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, near.to(tl.float32, bitcast=True), x)
    return x.to(WD)
