"""Stochastic rounding of fp32 values to 16 bits, and its random bits.

The random bits come from a counter (seed, parameter, step, element), so they do not depend on how
the parameter is sharded, and are the same after a resume.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def round_to_bf16(x: Tensor, key: int, start: int) -> Tensor:
    """Rounds fp32 ``x`` in place to one of its two bf16 neighbours; the mean over keys is x.

    Elements count from ``start``. Non-finite values stay as they are. Values beyond the largest
    bf16 become the largest bf16.
    """
    # The cheapest test on a CPU: without such values, the sum of squares is finite.
    odd = None if torch.dot(x.view(-1), x.view(-1)).isfinite() else x.clone()
    if odd is not None:
        most = torch.finfo(torch.bfloat16).max
        x.nan_to_num_(0, most, -most).clamp_(-most, most)
    bits = x.view(torch.int32)
    add_noise_(bits.view(-1), key, start)
    bits.bitwise_and_(-0x10000)
    return x if odd is None else x.copy_(x.where(odd.isfinite(), odd))


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


def key(seed: int, number: int, step: int) -> int:
    """A 32-bit key that distinguishes seeds, parameters and steps."""
    return (_fold(seed) + number * 0x9E3779B1 + step * 0x85EBCA77) % 2**32


def keys(seed: int, numbers: NDArray[np.uint64], step: int) -> NDArray[np.uint32]:
    """``key`` of several parameters, [n]."""
    found = numbers * np.uint64(0x9E3779B1)
    keyed: NDArray[np.uint32] = (found + np.uint64(_fold(seed) + step * 0x85EBCA77)).astype("u4")
    return keyed


def add_noise_(bits: Tensor, key: int, start: int) -> None:
    """Adds random numbers in [0, 2**16) to ``bits``, [n] int32, elements ``start`` and on.

    Each CHUNK of elements gets every number once: it reads a fixed permutation from a position that
    is a hash of (key, chunk). The numbers therefore depend on (key, element) alone.
    """
    table, at = _noise(bits.device), 0
    while at < len(bits):
        chunk, element = divmod(start + at, CHUNK)
        n = min(CHUNK - element, len(bits) - at)
        first = (place(key, chunk) + element) % CHUNK
        bits[at : at + n].add_(table[first : first + n])
        at += n


CHUNK = 2**16


def place(key: int, chunk: int) -> int:
    """The position in the permutation at which a chunk begins."""
    return _hash((key + chunk * 0xC2B2AE3D) % 2**32) % CHUNK


@functools.cache
def _noise(device: torch.device) -> Tensor:
    """A permutation of the numbers below 2**16, twice, so that reads may run past its end."""
    h = torch.arange(CHUNK, dtype=torch.int64, device="cpu")
    for shift, factor in ((7, 0x2993), (5, 0xE877), (9, 0x0235)):
        h.bitwise_xor_(h >> shift).mul_(factor).remainder_(CHUNK)
    h.bitwise_xor_(h >> 10)
    return h.to(device, torch.int32).repeat(2)


def _fold(number: int) -> int:
    """The hash of an integer of any size, 32 bits at a time."""
    return _hash(number if number < 2**32 else _fold(number >> 32) ^ number % 2**32)


def _hash(x: int) -> int:
    """A 32-bit hash: "lowbias32" of C. Wellons, "Prospecting for Hash Functions", 2018."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)
