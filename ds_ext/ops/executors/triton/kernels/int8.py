"""Encodes and decodes weights like ops/int8.py on a GPU, with the same codes and random numbers."""

import triton
import triton.language as tl

from ds_ext.ops import schema
from ds_ext.ops.executors.triton.kernels.weights import flips, place

CHUNK = tl.constexpr(schema.NOISE_CHUNK)
ROUND = tl.constexpr(1.5 * 2.0**23)  # added to a number below 2^22: its bits end with the integer
FINITE = tl.constexpr(0x7F800000)  # the bits of infinity
ABOVE_127 = tl.constexpr(0x7E0000)  # the bits of the fraction of 127 / 64


@triton.jit(do_not_specialize=["groups", "start", "key"])
def encode(
    values, codes, exponents, noise, groups: tl.int32, start: tl.int64, key: tl.int64,
    IS_RANDOM: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """codes ← values / scales, rounded to nearest, or by random numbers that depend on ``key``.

    A program encodes GROUPS groups of SIZE values, whose elements count from ``start``.
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    has = group < groups
    at = group.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(values + at, mask=has[:, None], other=0.0).to(tl.float32)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # bits: NaN is the largest
    # The exponent of the scale, plus 127. It is at least 1, and frexp says that of 0 is 0.
    exponent = tl.maximum((most >> 23) - 6 + ((most & 0x7FFFFF) > ABOVE_127).to(tl.int32), 1)
    exponent = tl.where(most == 0, 120, exponent)
    x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_RANDOM:
        first = start + group.to(tl.int64) * SIZE  # a group lies within one chunk
        first = place(key, first // CHUNK) + first.to(tl.uint32)
        position = (first[:, None] + tl.arange(0, SIZE)[None, :].to(tl.uint32)) % CHUNK
        code = tl.floor(x * 65536.0).to(tl.int32) + (tl.load(noise + position) ^ flips(key))
        code = code >> 16
        # Stored anew, values below 64 codes would get half the scale: they get it here.
        doubles = ((tl.max(tl.abs(code), axis=1) == 63) & (exponent > 1)).to(tl.int32)
        code = code << doubles[:, None]
        exponent -= doubles
    else:
        code = (x + ROUND).to(tl.int32, bitcast=True)
    tl.store(codes + at, code.to(tl.int8), mask=has[:, None])
    tl.store(exponents + group, tl.where(most < FINITE, exponent, 255).to(tl.uint8), mask=has)


@triton.jit(do_not_specialize=["groups"])
def decode(
    stored, values, groups: tl.int32, length: tl.int64, SIZE: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """values ← codes times scales, of a run of ``length`` bytes for each second index of a program.

    A byte has the exponent of a scale; 255 is NaN. All products are exact.
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    has = group < groups
    run = tl.program_id(1).to(tl.int64)
    codes = stored + run * length
    exponents = (codes + groups.to(tl.int64) * SIZE).to(tl.pointer_type(tl.uint8), bitcast=True)
    exponent = tl.load(exponents + group, mask=has, other=0).to(tl.int32)
    bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
    scale = bits.to(tl.float32, bitcast=True)[:, None]
    at = group.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(codes + at, mask=has[:, None], other=0).to(tl.float32) * scale
    tl.store(values + run * groups * SIZE + at, x.to(tl.bfloat16), mask=has[:, None])
