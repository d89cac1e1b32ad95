"""Normally distributed random numbers from a counter: no generator, no state.

Number i of (stream, seed, draw) depends on these four alone, not on how many numbers are drawn at
a time. 16 bits of an integer hash choose one of 65,536 quantiles from a table computed on the CPU.
Integers and a look-up have no rounding, so all devices agree. (Tested on CPUs; not run on a GPU.)
"""

import functools

import torch
from torch import Tensor

from ds_ext.ops import rounding
from ds_ext.ops.rounding import hash_
from ds_ext.ops.schema import PRIME1, PRIME2

LEVELS = 2**16


def normals(stream: Tensor, seed: int, draw: int, numbers: slice) -> Tensor:
    """Returns some of a sequence of independent numbers with mean 0 and variance 1.

    Args:
        stream: [] int64, distinguishes sequences of one seed: see ``state.Part.stream``. It is read
            on its device, so that the host does not wait for a GPU.
        seed: an integer >= 0 of any size.
        draw: distinguishes sequences of one stream.
        numbers: which numbers of the sequence, counted from 0.

    Returns:
        [n] fp32 on the device of ``stream``. Their largest magnitude is 4.33.
    """
    first, last = numbers.start // 2, -(-numbers.stop // 2)
    words = torch.arange(first, last, dtype=torch.int64, device=stream.device)
    # Two rounds: sequences whose keys collide in one round differ in the other.
    bits = hash_(words.mul_(PRIME1).add_(rounding.fold(seed) + draw * PRIME2))
    bits = hash_(bits.bitwise_xor_(hash_((stream * PRIME2).add_(draw))))
    halves = torch.stack((bits & LEVELS - 1, bits >> 16), dim=1).view(-1)
    levels = halves[numbers.start - 2 * first : numbers.stop - 2 * first]
    return _quantiles(stream.device)[levels]


@functools.cache
def _quantiles(device: torch.device) -> Tensor:
    """The quantiles of the normal distribution at (i + 1/2) / LEVELS, scaled to variance 1."""
    i = torch.arange(LEVELS, dtype=torch.float64, device="cpu")
    q: Tensor = torch.special.ndtri((i + 0.5) / LEVELS)
    return (q / q.square().mean().sqrt()).to(device, torch.float32)
