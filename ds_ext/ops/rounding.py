"""Stochastic rounding of fp32 values to 16 bits, and its random bits.

The random bits come from a counter (seed, parameter, step, element), so they do not depend on how
the parameter is sharded, and are the same after a resume. Those of one element are evenly spread
over the steps: a step flips the bits of one of Sobol's numbers in them. Each rounding has the right
mean as before, and the errors of many cancel: if an element moves by 1/32 of the spacing in each of
1,000 steps, the variance of the sum of its errors is a hundredth of independent numbers'.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops import schema

Bits = TypeVar("Bits", int, Tensor)
Number = TypeVar("Number", int, NDArray[np.int64])
MASK = 2**32 - 1


def round_to_bf16(x: Tensor, key: int, start: int) -> Tensor:
    """Rounds fp32 ``x`` in place to one of its two bf16 neighbours; the mean over keys is x.

    Elements count from ``start``. Non-finite values stay as they are. Values beyond the largest
    bf16 become the largest bf16.
    """
    most = torch.finfo(torch.bfloat16).max
    rounded = x.nan_to_num(0, most, -most).clamp_(-most, most)
    bits = rounded.view(torch.int32)
    add_noise_(bits.view(-1), key, start)
    bits.bitwise_and_(-0x10000)
    return x.copy_(rounded.where(x.isfinite(), x))


def round_to_fp16(x: Tensor, key: int, start: int) -> Tensor:
    """``round_to_bf16`` for fp16, whose spacing is 2**-24 for all values below 2**-14."""
    most = torch.finfo(torch.float16).max
    bounded = x.clamp(-most, most)
    power = bounded.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    spacing = power.clamp_(min=2**-14).mul_(2**-10)
    steps = bounded / spacing
    whole = steps.trunc()
    # Away from zero where the truncated part, which is at least 0, exceeds the noise.
    more = (steps - whole).abs_().mul_(-(2**16)).to(torch.int32)
    add_noise_(more.view(-1), key, start)
    further = (more < 0).to(x.dtype).copysign_(steps)
    rounded = whole.add_(further).mul_(spacing)
    return x.copy_(rounded.where(x.isfinite(), x))


ROUND: dict[torch.dtype, Callable[[Tensor, int, int], Tensor]] = {
    torch.bfloat16: round_to_bf16,
    torch.float16: round_to_fp16,
}


def key(seed: int, number: Number, step: int, dimension: int = 1) -> Number:
    """A 48-bit key: the lower 32 bits distinguish seeds and parameters, the upper 16 steps.

    Two roundings of a value in a step need seeds and dimensions (0, 1) of their own.
    """
    return (fold(seed) + number * schema.PRIME1) % 2**32 + (sobol(step, dimension) << 32)


@functools.lru_cache(16)  # the parameters of a step share it
def sobol(i: int, dimension: int) -> int:
    """Number ``i`` of the first two dimensions (0, 1) of Sobol's sequence, shuffled, in 16 bits.

    Any 2**m numbers from a multiple of 2**m on lie one in each of 2**m equal intervals, and, as
    pairs, one in each of 2**m equal boxes with sides of powers of two. Halves of these blocks are
    swapped at random: without that, every second step, say, meets half of the numbers.
    """
    for bit in range(16):
        i ^= (hash_((i >> bit + 1) * 16 + bit) & 1) << bit
    found, direction = 0, 2**15
    for bit in range(16):
        found ^= direction * (i >> bit & 1)
        direction = direction >> 1 ^ direction * dimension
    return found


def keys(seed: int, numbers: NDArray[np.uint32], step: int) -> NDArray[np.int64]:
    """``key`` of several parameters, [n]."""
    return key(seed, numbers.astype(np.int64), step)


def add_noise_(bits: Tensor, key: int, start: int) -> None:
    """Adds random numbers in [0, 2**16) to ``bits``, [n] int32, elements ``start`` and on.

    Each chunk of elements gets every number once: it reads a fixed permutation from a position that
    is a hash of (key, chunk), and flips the upper bits of the key in it. The numbers therefore
    depend on (key, element) alone.
    """
    if bits.device.type != "cpu":
        bits.add_(_gathered(key, start, len(bits), bits.device))
        return
    table, at = noise_table(bits.device), 0
    while at < len(bits):
        chunk, element = divmod(start + at, schema.NOISE_CHUNK)
        n = min(schema.NOISE_CHUNK - element, len(bits) - at)
        first = (place(key, chunk) + element) % schema.NOISE_CHUNK
        bits[at : at + n].add_(table[first : first + n] ^ (key >> 32))
        at += n


def _gathered(key: int, start: int, n: int, device: torch.device) -> Tensor:
    """The numbers of ``add_noise_``, [n] int32, for devices where each operation is a launch."""
    size = schema.NOISE_CHUNK
    first, end = start // size, -(-(start + n) // size)
    chunks = torch.arange(first, end, dtype=torch.int64, device=device)
    places = hash_(chunks.mul_(schema.PRIME3).add_(key)).remainder_(size)
    at = places.unsqueeze(1) + torch.arange(size, dtype=torch.int64, device=device)
    return noise_table(device)[at].view(-1)[start - first * size :][:n] ^ (key >> 32)


def place(key: int, chunk: int) -> int:
    """The position in the permutation at which a chunk begins."""
    return hash_((key + chunk * schema.PRIME3) % 2**32) % schema.NOISE_CHUNK


@functools.cache
def noise_table(device: torch.device) -> Tensor:
    """A permutation of the numbers below 2**16, twice, so that reads may run past its end."""
    h = torch.arange(schema.NOISE_CHUNK, dtype=torch.int64, device="cpu")
    for shift, factor in ((7, schema.NOISE1), (5, schema.NOISE2), (9, schema.NOISE3)):
        h.bitwise_xor_(h >> shift).mul_(factor).remainder_(schema.NOISE_CHUNK)
    h.bitwise_xor_(h >> 10)
    return h.to(device, torch.int32).repeat(2)


@functools.cache
def shifted_noise(device: torch.device) -> Tensor:
    """The table of ``add_noise_`` for kernels, [NOISE_SHIFTS, 2 · NOISE_CHUNK] in 16 bits.

    Row s begins with number s of the permutation. For any position, one of the rows has the
    numbers from there on at an address that is aligned to 16 bytes. Rounding positions down
    instead would leave an element an eighth of the numbers, and bias its rounding. The cache keeps
    the table alive, because kernels have only its address.
    """
    table = noise_table(torch.device("cpu")).to(torch.int16)
    return torch.stack([table.roll(-s) for s in range(schema.NOISE_SHIFTS)]).to(device)


@functools.cache
def fold(number: int) -> int:
    """The hash of an integer of any size, 32 bits at a time."""
    return hash_(number if number < 2**32 else fold(number >> 32) ^ number % 2**32)


def hash_(x: Bits) -> Bits:
    """Returns a 32-bit hash of the lower 32 bits of an integer, or of an int64 tensor in place."""
    x &= MASK
    for shift, factor in ((16, schema.LOWBIAS1), (15, schema.LOWBIAS2)):
        x ^= x >> shift
        x *= factor
        x &= MASK
    x ^= x >> 16
    return x
