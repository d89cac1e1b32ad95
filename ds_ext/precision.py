"""How a new weight is written back: fp32 and fp64 as it is, 16 bits in one of three ways.

Rounded to nearest, a bf16 weight does not move by less than half its spacing (1/256 of it), and
small updates are lost; rounded up or down at random it moves by them on average. The random bits
come from a counter (seed, parameter, step, element), so that they are the same however the
parameter is sharded, and again after a resume. A master keeps, beside the weight, what rounding
takes from it: a bf16 weight is stepped as if it were fp32 for two bytes more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from ds_ext.hyper import Size
from ds_ext.shard import Block, Shard

WeightUpdate = Annotated[
    Literal["stochastic", "nearest", "master"],
    Field(description='"stochastic", "nearest" or "master"'),
]


@dataclass(frozen=True)
class Writing:
    """The hyper-parameters that every optimizer has beside its rule's."""

    weight_update: WeightUpdate = "stochastic"  # how a 16-bit weight is rounded; no other is
    seed: Size = 0  # of the random bits of "stochastic"


# Runs of 16 bits, read and written as fp32. ``write_`` returns what they then hold.


@dataclass(frozen=True)
class StochasticWeight:
    """A 16-bit run that rounds what is written to it, up or down at random."""

    run: Tensor
    key: int  # 32 bits
    start: int  # element of the whole parameter that the run starts at

    def block(self, b: Block) -> Tensor:
        return self.run[b.run].view(b.shape).float()

    def write_(self, b: Block, new: Tensor) -> Tensor:
        rounded = ROUND[self.run.dtype](new, self.key, self.start + b.run.start)
        self.run[b.run].view(b.shape).copy_(rounded)
        return rounded


@dataclass(frozen=True)
class SplitWeight:
    """A bf16 run and an int16 one: the upper half of an fp32, and what it lacks to all its bits.

    The upper half is rounded, halves away from zero, and the lower is signed: one pair for every
    fp32. A NaN becomes the one whose lower half is 0, for others would round to inf or to zero.
    """

    run: Tensor
    residual: Tensor

    def block(self, b: Block) -> Tensor:
        bits = self.run[b.run].float().view(torch.int32).add_(self.residual[b.run])
        return bits.view(torch.float32).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        x = new.nan_to_num(torch.nan, torch.inf, -torch.inf).reshape(-1)
        bits = x.view(torch.int32)
        self.residual[b.run].copy_(bits)  # keeps the low 16 bits
        self.run[b.run].view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))
        return new


@dataclass(frozen=True)
class CopiedWeight:
    """An fp16 run and its fp32 copy, which counts where the run is still what was made of it.

    No 16 bits would do here: an fp32 has a wider range than fp16. Weights that someone else has
    changed since, say by loading a model, are taken from the run.
    """

    run: Tensor
    copy: Tensor

    def block(self, b: Block) -> Tensor:
        run, copy = self.run[b.run], self.copy[b.run]
        return torch.where(copy.to(run.dtype) == run, copy, run.float()).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        self.copy[b.run].view(b.shape).copy_(new)
        self.run[b.run].view(b.shape).copy_(new)
        return new


Weight: TypeAlias = Tensor | StochasticWeight | SplitWeight | CopiedWeight


def weight(p: Tensor, s: dict[str, Any], how: Writing, number: int, shard: Shard) -> Weight:
    """What a rule reads and writes as its weight: the run ``p``, or one that rounds.

    A master is kept in the parameter's state ``s``, made here where it is missing and dropped
    where it is not asked for. ``number`` tells parameters apart and ``s["step"]`` their steps.
    """
    if how.weight_update != "master":
        s.pop("master", None)
    elif "master" not in s:
        s.update(master(p, how))
    if p.dtype not in ROUND or how.weight_update == "nearest":
        return p
    if how.weight_update == "stochastic":
        return StochasticWeight(p, key(how.seed, number, s["step"]), shard.start)
    return _with_master(p, s)


def master(p: Tensor, how: Writing) -> dict[str, Tensor]:
    """What is kept beside a run to have its weights in fp32: 2 bytes for a bf16, 4 for an fp16."""
    if p.dtype not in ROUND or how.weight_update != "master":
        return {}
    if p.dtype == torch.bfloat16:
        return {"master": torch.zeros_like(p, dtype=torch.int16)}
    return {"master": p.float()}


def values(p: Tensor, s: dict[str, Any], shard: Shard) -> Tensor:
    """What a run ``p`` is: fp32 where it has a master, or itself."""
    if "master" not in s:
        return p
    held = _with_master(p, s)
    new = torch.empty(len(p), dtype=torch.float32)
    for b in shard.blocks():
        new[b.run].view(b.shape).copy_(held.block(b))
    return new


def set_(p: Tensor, s: dict[str, Any], how: Writing, shard: Shard, new: Tensor) -> None:
    """Makes ``new``, [len(p)], what a run is; with a state ``s``, also what its master holds."""
    s.pop("master", None)
    made = master(p, how)
    if not s or not made:
        p.copy_(new)
        return
    s.update(made)
    held = _with_master(p, s)
    for b in shard.blocks():
        held.write_(b, new[b.run].to(p.device, torch.float32).view(b.shape))


def _with_master(p: Tensor, s: dict[str, Any]) -> SplitWeight | CopiedWeight:
    return (SplitWeight if p.dtype == torch.bfloat16 else CopiedWeight)(p, s["master"])


def round_to_bf16(x: Tensor, key: int, start: int) -> Tensor:
    """fp32 ``x`` rounded to one of its two bf16 neighbours, as fp32; its mean over keys is x.

    Elements count from ``start``, below 2**32. What is not finite stays as it is, and what lies
    beyond the largest bf16 goes to that.
    """
    bits = _bounded(x, torch.bfloat16).view(torch.int32)
    noise = random_bits(x.numel(), key, start, x.device).bitwise_and_(0xFFFF)
    rounded = noise.view(x.shape).add_(bits).bitwise_and_(-0x10000).view(torch.float32)
    return _where_finite_(rounded, x)


def round_to_fp16(x: Tensor, key: int, start: int) -> Tensor:
    """The same for fp16, whose spacing is 2**-24 for all that is smaller than 2**-14."""
    bounded = _bounded(x, torch.float16)
    power = bounded.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    spacing = power.clamp_(min=2**-14).mul_(2**-10)
    steps = bounded / spacing
    whole = steps.trunc()
    threshold = _shift_right(random_bits(x.numel(), key, start, x.device), 8).view(x.shape)
    above = (steps - whole).abs_().mul_(2**24).sub_(threshold)
    further = above.ceil_().clamp_(0, 1).copysign_(steps)  # 1 where above > 0
    rounded = whole.add_(further).mul_(spacing)
    return _where_finite_(rounded, x)


def _bounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return x.contiguous().clamp(-most, most)


def _where_finite_(rounded: Tensor, x: Tensor) -> Tensor:
    """``rounded``, but x where x is not finite; isfinite and where take five times as long."""
    most = torch.finfo(torch.float32).max
    return rounded.clamp_(x - most, x + most)


ROUND: dict[torch.dtype, Callable[[Tensor, int, int], Tensor]] = {
    torch.bfloat16: round_to_bf16,
    torch.float16: round_to_fp16,
}


def key(seed: int, number: int, step: int) -> int:
    """32 bits that tell apart seeds, parameters and their steps."""
    return (_fold(seed) + number * 0x9E3779B1 + step * 0x85EBCA77) % 2**32


def random_bits(n: int, key: int, start: int, device: torch.device) -> Tensor:
    """``n`` hashes of 32 bits of the counters key + start, key + start + 1, ... -> [n] int32.

    Source: the integer hash "lowbias32" of C. Wellons, "Prospecting for Hash Functions", 2018.
    """
    h = torch.arange(n, dtype=torch.int32, device=device).add_(_signed(_hash(key) + start))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h.bitwise_xor_(_shift_right(h, shift)).mul_(_signed(factor))
    return h.bitwise_xor_(_shift_right(h, 16))


def _fold(number: int) -> int:
    """The hash of a number of any size, 32 bits of it after the others."""
    return _hash(number if number < 2**32 else _fold(number >> 32) ^ number % 2**32)


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
