"""The forms in which a weight of 16 bits is kept, each read and written as fp32.

``block`` and ``write_`` are what rules call; ``write_`` returns what the run then holds, which may
lie where the new values were. ``part`` is the same of some elements. ``storage`` is
what native code and kernels see.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops import scratch
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.rounding import ROUND
from ds_ext.ops.schema import HALF, MOST, PARTS
from ds_ext.ops.shard import Block


@dataclass(frozen=True)
class StochasticWeight:
    """A 16-bit run that rounds what is written to it, up or down at random."""

    run: Tensor
    key: int  # 32 bits
    start: int  # element of the whole parameter that the run starts at

    def storage(self) -> WeightStorage:
        """Describes this to native code and kernels."""
        return WeightStorage(self.run, "STOCHASTIC", key=self.key, start=self.start)

    def part(self, run: slice) -> "StochasticWeight":
        """Returns some elements of the run, to be read and written as they are in it."""
        return StochasticWeight(self.run[run], self.key, self.start + run.start)

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which are the caller's to overwrite."""
        run = self.run[b.run].view(b.shape)
        return scratch.empty(b.shape, torch.float32, run.device).copy_(run)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols] -> what it then holds."""
        rounded = ROUND[self.run.dtype](new, self.key, self.start + b.run.start)
        self.run[b.run].view(b.shape).copy_(rounded)
        return rounded


@dataclass(frozen=True)
class SplitWeight:
    """A bf16 run and an int16 one: the upper half of an fp32, and what it lacks to all its bits.

    The upper half is rounded, halves away from zero, and the lower is signed: one pair for every
    fp32. A NaN becomes the one whose lower half is 0, for others would round to inf or to zero.
    """

    HOW: ClassVar[str] = "SPLIT"
    run: Tensor
    residual: Tensor

    def storage(self) -> WeightStorage:
        """Describes this to native code and kernels."""
        return WeightStorage(self.run, self.HOW, self.residual)

    def part(self, run: slice) -> "SplitWeight":
        """Returns some elements of the run, to be read and written as they are in it."""
        return SplitWeight(self.run[run], self.residual[run])

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which are the caller's to overwrite."""
        run = self.run[b.run].view(b.shape)
        x = scratch.empty(b.shape, torch.float32, run.device).copy_(run)
        x.view(torch.int32).add_(self.residual[b.run].view(b.shape))
        return x

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols] -> what it then holds."""
        new.nan_to_num_(torch.nan, torch.inf, -torch.inf)
        bits = new.view(torch.int32)
        self.residual[b.run].view(b.shape).copy_(bits)  # keeps the low 16 bits
        upper = torch.add(bits, 0x8000, out=scratch.like(bits)).bitwise_right_shift_(16)
        self.run[b.run].view(torch.int16).view(b.shape).copy_(upper)
        return new


@dataclass(frozen=True)
class CopiedWeight:
    """An fp16 run and its fp32 copy, which is used while the run still equals it in fp16.

    No 16 bits would do here: an fp32 has a wider range than fp16. Weights that someone else has
    changed since, say by loading a model, are taken from the run.
    """

    HOW: ClassVar[str] = "COPIED"
    run: Tensor
    copy: Tensor

    def storage(self) -> WeightStorage:
        """Describes this to native code and kernels."""
        return WeightStorage(self.run, self.HOW, self.copy)

    def part(self, run: slice) -> "CopiedWeight":
        """Returns some elements of the run, to be read and written as they are in it."""
        return CopiedWeight(self.run[run], self.copy[run])

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which are the caller's to overwrite."""
        run, copy = self.run[b.run], self.copy[b.run]
        return torch.where(copy.to(run.dtype) == run, copy, run.float()).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols] -> what it then holds."""
        self.copy[b.run].view(b.shape).copy_(new)
        self.run[b.run].view(b.shape).copy_(new)
        return new


INFINITE = 0x7F800000  # the bits of an fp32 infinity


@dataclass(frozen=True)
class CorrectedWeight:
    """A 16-bit run, rounded to nearest, and 8 bits of what that took from each of its weights.

    The error is kept in parts of 1/127 of half the spacing of bf16 (or fp16) numbers at the weight,
    as FlashOptim has it (arXiv 2602.23349): at most half a part is lost. Two details differ from
    its code, ``MOST`` and ``HALF``, so that a pair written from the sum of a pair is that pair.
    """

    HOW: ClassVar[str] = "CORRECTED"
    run: Tensor
    error: Tensor

    def storage(self) -> WeightStorage:
        """Describes this to native code and kernels."""
        return WeightStorage(self.run, self.HOW, self.error)

    def part(self, run: slice) -> "CorrectedWeight":
        """Returns some elements of the run, to be read and written as they are in it."""
        return CorrectedWeight(self.run[run], self.error[run])

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which are the caller's to overwrite."""
        near = self._near(b)
        x = scratch.like(near).copy_(self.error[b.run].view(b.shape)).clamp_(-MOST, MOST)
        x.mul_(torch.finfo(self.run.dtype).eps / (2 * PARTS))
        return x.mul_(self._power(near).view(torch.float32)).add_(near)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols] -> what it then holds."""
        self.run[b.run].view(b.shape).copy_(new)
        near = self._near(b)
        inverse = self._power(near).neg_().add_(INFINITE).view(torch.float32)  # of half the power
        parts = new.sub_(near).mul_(inverse).mul_(PARTS / torch.finfo(self.run.dtype).eps)
        parts.nan_to_num_(0.0, 0.0, 0.0)  # where the weight is not finite
        parts.add_(torch.sign(parts, out=near), alpha=HALF)
        self.error[b.run].view(b.shape).copy_(parts)
        return self.block(b)

    def _near(self, b: Block) -> Tensor:
        """The weights as the model has them, [mats, rows, cols] fp32."""
        x = scratch.empty(b.shape, torch.float32, self.run.device)
        return x.copy_(self.run[b.run].view(b.shape))

    def _power(self, near: Tensor) -> Tensor:
        """The bits of the power of two below each weight; subnormal ones lie as those above do."""
        bits = near.view(torch.int32)
        power = torch.bitwise_and(bits, INFINITE, out=scratch.like(bits))
        least = torch.finfo(self.run.dtype).smallest_normal
        return power.clamp_(_bits(least), _bits(2.0**127))


def _bits(x: float) -> int:
    """Those of a power of two as an fp32."""
    return (int(math.log2(x)) + 127) << 23


Form: TypeAlias = StochasticWeight | SplitWeight | CopiedWeight | CorrectedWeight
# By the dtype of what is kept beside the run.
MASTERS: dict[torch.dtype, type[SplitWeight] | type[CopiedWeight] | type[CorrectedWeight]] = {
    torch.int16: SplitWeight,
    torch.float32: CopiedWeight,
    torch.int8: CorrectedWeight,
}
