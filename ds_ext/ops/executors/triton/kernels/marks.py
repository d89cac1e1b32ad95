"""fingerprints.py on a GPU: fingerprints (marks) of groups of weights, and dropped residuals."""

import triton
import triton.language as tl

from ds_ext.ops import schema
from ds_ext.ops.executors.triton.kernels.table_access import (
    AUX,
    MARKS,
    N,
    W,
    hinted,
    pointer,
    vectors,
)

PRIME1, PRIME2 = tl.constexpr(schema.PRIME1), tl.constexpr(schema.PRIME2)


@triton.jit
def mark(t, tile, P: tl.constexpr):
    """marks ← the fingerprints of a 16-bit run w."""
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    _, _, _, group, has, found = _hashed(t, tile, TR, TC, ALIGNED)
    tl.store(pointer(t, MARKS, tl.int16) + group, found, mask=has)


@triton.jit
def mend(t, tile, P: tl.constexpr):
    """aux, of dtype AD, ← 0 where w was edited: fingerprints.mend_. Reads aux only if needed."""
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    AD: tl.constexpr = P.AD
    bits, e, ok, group, has, found = _hashed(t, tile, TR, TC, ALIGNED)
    size = bits.to(tl.int32) & 0x7FFF
    at = vectors(t, AUX, AD, ALIGNED) + e
    differs = found != tl.load(pointer(t, MARKS, tl.int16) + group, mask=has, other=0)
    differs = (differs & has)[:, None]
    rest = tl.load(at, mask=ok & (_is_odd(size) | differs), other=0)
    zeroed = differs & (size == 0) & (rest != 0)
    some = tl.max(zeroed.to(tl.int32), axis=1)[:, None] > 0
    drop = zeroed | (differs & (some == 0))
    if AD == tl.int16:
        drop = drop | _is_no_number(size, rest)
    tl.store(at, tl.zeros([TR, TC], dtype=AD), mask=ok & drop & (rest != 0))


@triton.jit
def mend_unmarked(t, tile, P: tl.constexpr):
    """``mend`` for a split state without fingerprints: aux ← 0 where the pair is invalid."""
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    bits, e, ok, _, _, _ = _hashed(t, tile, TR, TC, ALIGNED)
    size = bits.to(tl.int32) & 0x7FFF
    at = vectors(t, AUX, tl.int16, ALIGNED) + e
    rest = tl.load(at, mask=ok & _is_odd(size), other=0)
    drop = _is_no_number(size, rest)
    tl.store(at, tl.zeros([TR, TC], dtype=tl.int16), mask=ok & drop & (rest != 0))


@triton.jit
def _hashed(t, table_tile, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Hashes TR groups of a 16-bit run.

    Returns the bits [TR, TC], their indices and their mask, the groups [TR], their mask, their
    fingerprints.
    """
    n = tl.load(t + N)
    group = table_tile.to(tl.int64) * TR + tl.arange(0, TR)
    begin = group * TC
    high = tl.minimum(tl.maximum(n - begin, 0), TC).to(tl.int32)
    k = tl.arange(0, TC)
    e = hinted(begin, ALIGNED)[:, None] + k[None, :]
    ok = k[None, :] < hinted(high, ALIGNED)[:, None]
    bits = tl.load(vectors(t, W, tl.int16, ALIGNED) + e, mask=ok, other=0)
    sums = tl.sum(bits.to(tl.int32) * _factor(k)[None, :], axis=1)
    return bits, e, ok, group, begin < n, (sums >> 16).to(tl.int16)


@triton.jit
def _factor(k):
    """fingerprints._factors: an odd number for each element of a group."""
    h = (k + 1).to(tl.uint32) * PRIME1
    h = (h ^ (h >> 15)) * PRIME2
    return (h | 1).to(tl.int32)


@triton.jit
def _is_odd(size):
    """Whether a weight is 0, infinite or NaN, by its bits without the sign."""
    return (size == 0) | (size >= 0x7F80)


@triton.jit
def _is_no_number(size, rest):
    """Whether a weight and its residual are an invalid pair.

    Residuals are invalid if negative at 0, positive at inf, or not 0 at NaN.
    """
    drop = ((size == 0) & (rest < 0)) | ((size == 0x7F80) & (rest > 0))
    return drop | ((size > 0x7F80) & (rest != 0))
