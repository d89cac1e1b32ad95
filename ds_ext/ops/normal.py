"""Random numbers with a normal distribution, from a counter: no generator, no state.

Number i of (stream, seed, draw) depends on these four alone. It is made of 16 bits of an integer
hash, which choose one of 65,536 quantiles from a table that the CPU has made: whole numbers and a
look-up, which no device rounds, and nothing that depends on how many are drawn at a time. (The
tests hold it on CPUs; it has not been run on a GPU.)
"""

import functools

import torch
from torch import Tensor

from ds_ext.ops import rounding

LEVELS = 2**16
MASK = 2**32 - 1


def normals(stream: Tensor, seed: int, draw: int, numbers: slice) -> Tensor:
    """Returns some of a sequence of independent numbers with mean 0 and variance 1.

    Args:
        stream: [] int64, what tells sequences of one seed apart: see ``state.Part.stream``. It is
            read where it lies, so that the host does not wait for a GPU.
        seed: a whole number >= 0 of any size.
        draw: tells sequences of one stream apart.
        numbers: which of the sequence, counted from 0.

    Returns:
        [n] fp32 on the device of ``stream``. Their largest magnitude is 4.33.
    """
    first, last = numbers.start // 2, -(-numbers.stop // 2)
    words = torch.arange(first, last, dtype=torch.int64, device=stream.device)
    # Two rounds: sequences that meet in one of the keys do not meet in the other.
    bits = _hash_(words.mul_(0x9E3779B1).add_(rounding.key(seed, 0, draw)))
    bits = _hash_(bits.bitwise_xor_(_hash_((stream * 0x85EBCA77).add_(draw))))
    halves = torch.stack((bits & LEVELS - 1, bits >> 16), dim=1).view(-1)
    levels = halves[numbers.start - 2 * first : numbers.stop - 2 * first]
    return _quantiles(stream.device)[levels]


@functools.cache
def _quantiles(device: torch.device) -> Tensor:
    """The quantiles of the normal distribution at (i + 1/2) / LEVELS, scaled to variance 1."""
    i = torch.arange(LEVELS, dtype=torch.float64, device="cpu")
    q: Tensor = torch.special.ndtri((i + 0.5) / LEVELS)
    return (q / q.square().mean().sqrt()).to(device, torch.float32)


def _hash_(x: Tensor) -> Tensor:
    """``rounding``'s hash of the lower 32 bits of int64 numbers, in place -> x."""
    x.bitwise_and_(MASK)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(MASK)
    x.bitwise_xor_(x >> 16)
    return x
