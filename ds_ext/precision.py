"""How a new weight is written back: fp32 as it is, bf16 with stochastic rounding.

Rounded to nearest, a bf16 weight does not move by less than half its spacing (1/256 of it), and
small updates are lost; rounded up or down at random it moves by them on average. The random bits
come from a counter (parameter, step, element), so that they are the same however the parameter is
sharded, and again after a resume.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext.shard import Block, Shard


@dataclass(frozen=True)
class StochasticWeight:
    """A bf16 run that rounds what is written to it, up or down at random."""

    run: Tensor
    key: int  # 32 bits
    start: int  # element of the whole parameter that the run starts at

    def block(self, b: Block) -> Tensor:
        return self.run[b.run].view(b.shape).float()

    def write_(self, b: Block, new: Tensor) -> None:
        rounded = round_stochastic(new, self.key, self.start + b.run.start)
        self.run[b.run].view(b.shape).copy_(rounded)


def weight(p: Tensor, number: int, step: int, shard: Shard) -> Tensor | StochasticWeight:
    """What a rule reads and writes as its weight: the run ``p``, or one that rounds.

    ``number`` tells parameters apart and ``step`` their steps.
    """
    if p.dtype != torch.bfloat16:
        return p
    return StochasticWeight(p, (number * 0x9E3779B1 + step * 0x85EBCA77) % 2**32, shard.start)


def round_stochastic(x: Tensor, key: int, start: int) -> Tensor:
    """fp32 ``x`` rounded to one of its two bf16 neighbours, as fp32; its mean over keys is x.

    Elements count from ``start``, below 2**32. What is not finite stays as it is.
    """
    bits = x.contiguous().view(torch.int32)
    noise = random_bits(x.numel(), key, start, x.device).bitwise_and_(0xFFFF)
    rounded = noise.view(x.shape).add_(bits).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def random_bits(n: int, key: int, start: int, device: torch.device) -> Tensor:
    """``n`` hashes of 32 bits of the counters key + start, key + start + 1, ... -> [n] int32.

    Source: the integer hash "lowbias32" of C. Wellons, "Prospecting for Hash Functions", 2018.
    """
    h = torch.arange(n, dtype=torch.int32, device=device).add_(_signed(_hash(key) + start))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h.bitwise_xor_(_shift_right(h, shift)).mul_(_signed(factor))
    return h.bitwise_xor_(_shift_right(h, 16))


def _hash(key: int) -> int:
    """The same hash of one number."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        key = (key ^ (key >> shift)) * factor % 2**32
    return key ^ (key >> 16)


def _shift_right(h: Tensor, n: int) -> Tensor:
    """A shift that fills with zeros; torch's int32 shift repeats the sign."""
    return h.bitwise_right_shift(n).bitwise_and_(2 ** (32 - n) - 1)


def _signed(x: int) -> int:
    """The int32 of the same 32 bits."""
    return (x + 2**31) % 2**32 - 2**31
