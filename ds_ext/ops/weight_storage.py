"""Storage of 16-bit weights; each kind is read and written as fp32.

Rules call ``block`` and ``write_``. ``write_`` returns the values that the run then has; they may
overwrite its argument. ``part`` selects some elements. ``storage`` describes it to native
code and kernels.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops import scratch
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.rounding import ROUND
from ds_ext.ops.schema import ERROR_LEVELS, HALF, MAX_ERROR_CODE, MAX_INWARD_CODE
from ds_ext.ops.shard import Block


@dataclass(frozen=True)
class StochasticWeight:
    """A 16-bit run with stochastic rounding of new values."""

    run: Tensor
    key: int  # 32 bits
    start: int  # index of the run's first element in the parameter, or in its joined sections

    def storage(self) -> WeightStorage:
        """Returns the description for native code and kernels."""
        return WeightStorage(self.run, "STOCHASTIC", key=self.key, start=self.start)

    def part(self, run: slice) -> "StochasticWeight":
        """Returns some elements of the run in the same form."""
        return StochasticWeight(self.run[run], self.key, self.start + run.start)

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which the caller may overwrite."""
        run = self.run[b.run].view(b.shape)
        return scratch.empty(b.shape, torch.float32, run.device).copy_(run)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols]; returns the values that it then has."""
        rounded = ROUND[self.run.dtype](new, self.key, self.start + b.run.start)
        self.run[b.run].view(b.shape).copy_(rounded)
        return rounded


@dataclass(frozen=True)
class SplitWeight:
    """A bf16 run and an int16 residual, which together hold all bits of an fp32.

    The bf16 is the rounded upper half, ties away from zero; the residual is the signed lower half.
    Every fp32 has one such pair. All NaNs become the NaN with lower half 0, because others would
    round to inf or zero. A sum that is NaN, as of a negative residual and a weight that was set to
    zero since, reads as the weight.
    """

    HOW: ClassVar[str] = "SPLIT"
    run: Tensor
    residual: Tensor

    def storage(self) -> WeightStorage:
        """Returns the description for native code and kernels."""
        return WeightStorage(self.run, self.HOW, self.residual)

    def part(self, run: slice) -> "SplitWeight":
        """Returns some elements of the run in the same form."""
        return SplitWeight(self.run[run], self.residual[run])

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which the caller may overwrite."""
        run = self.run[b.run].view(b.shape)
        x = scratch.empty(b.shape, torch.float32, run.device).copy_(run)
        x.view(torch.int32).add_(self.residual[b.run].view(b.shape))
        return torch.where(x.isnan(), run, x, out=x)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols]; returns the values that it then has."""
        new.nan_to_num_(torch.nan, torch.inf, -torch.inf)
        bits = new.view(torch.int32)
        self.residual[b.run].view(b.shape).copy_(bits)  # keeps the low 16 bits
        upper = torch.add(bits, 0x8000, out=scratch.like(bits)).bitwise_right_shift_(16)
        self.run[b.run].view(torch.int16).view(b.shape).copy_(upper)
        return new


@dataclass(frozen=True)
class CopiedWeight:
    """An fp16 run and its fp32 copy; a copy is used while it still rounds to its weight.

    A 16-bit residual is not enough here, because fp32 has a wider range than fp16. Weights that
    were edited since, for example by loading a model, are read from the run.
    """

    HOW: ClassVar[str] = "COPIED"
    run: Tensor
    copy: Tensor

    def storage(self) -> WeightStorage:
        """Returns the description for native code and kernels."""
        return WeightStorage(self.run, self.HOW, self.copy)

    def part(self, run: slice) -> "CopiedWeight":
        """Returns some elements of the run in the same form."""
        return CopiedWeight(self.run[run], self.copy[run])

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which the caller may overwrite."""
        run, copy = self.run[b.run], self.copy[b.run]
        return torch.where(copy.to(run.dtype) == run, copy, run.float()).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols]; returns the values that it then has."""
        self.copy[b.run].view(b.shape).copy_(new)
        self.run[b.run].view(b.shape).copy_(new)
        return new


INFINITE = 0x7F800000  # the bits of an fp32 infinity


@dataclass(frozen=True)
class CorrectedWeight:
    """A 16-bit run, rounded to nearest, and 8 bits of each weight's rounding error.

    The unit of the error is 1/127 of half the spacing of bf16 (or fp16) numbers at the weight, as
    in FlashOptim (arXiv 2602.23349): at most half a unit is lost. ``MAX_ERROR_CODE`` and
    ``HALF`` differ from FlashOptim's code, so that writing the sum of a pair gives the same pair.
    ``MAX_INWARD_CODE`` limits what remains of an overwritten weight, for the same reason.
    """

    HOW: ClassVar[str] = "CORRECTED"
    run: Tensor
    error: Tensor

    def storage(self) -> WeightStorage:
        """Returns the description for native code and kernels."""
        return WeightStorage(self.run, self.HOW, self.error)

    def part(self, run: slice) -> "CorrectedWeight":
        """Returns some elements of the run in the same form."""
        return CorrectedWeight(self.run[run], self.error[run])

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which the caller may overwrite."""
        near = self._near(b)
        x = scratch.like(near).copy_(self.error[b.run].view(b.shape))
        x.clamp_(-MAX_ERROR_CODE, MAX_ERROR_CODE)
        narrow = (near.frexp().mantissa.abs() == 0.5) & (near.signbit() != x.signbit())
        narrow &= near.abs() > torch.finfo(self.run.dtype).smallest_normal
        torch.where(narrow, x.clamp(-MAX_INWARD_CODE, MAX_INWARD_CODE), x, out=x)
        x.mul_(torch.finfo(self.run.dtype).eps / (2 * ERROR_LEVELS))
        return x.mul_(self._power(near).view(torch.float32)).add_(near)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        """Writes a block, [mats, rows, cols]; returns the values that it then has."""
        self.run[b.run].view(b.shape).copy_(new)
        near = self._near(b)
        inverse = self._power(near).neg_().add_(INFINITE).view(torch.float32)  # of half the power
        parts = new.sub_(near).mul_(inverse).mul_(ERROR_LEVELS / torch.finfo(self.run.dtype).eps)
        parts.nan_to_num_(0.0, 0.0, 0.0)  # where the weight is not finite
        parts.add_(torch.sign(parts, out=near), alpha=HALF)
        self.error[b.run].view(b.shape).copy_(parts)
        return self.block(b)

    def _near(self, b: Block) -> Tensor:
        """The 16-bit weights that the model uses, [mats, rows, cols] fp32."""
        x = scratch.empty(b.shape, torch.float32, self.run.device)
        return x.copy_(self.run[b.run].view(b.shape))

    def _power(self, near: Tensor) -> Tensor:
        """The bits of the power of two below each weight, at least the smallest normal number."""
        bits = near.view(torch.int32)
        power = torch.bitwise_and(bits, INFINITE, out=scratch.like(bits))
        least = torch.finfo(self.run.dtype).smallest_normal
        return power.clamp_(_bits(least), _bits(2.0**127))


def _bits(x: float) -> int:
    """The fp32 bits of a power of two."""
    return (int(math.log2(x)) + 127) << 23


StoredWeight: TypeAlias = StochasticWeight | SplitWeight | CopiedWeight | CorrectedWeight
# By the dtype of the tensor that is stored beside the run.
MASTERS: dict[torch.dtype, type[SplitWeight] | type[CopiedWeight] | type[CorrectedWeight]] = {
    torch.int16: SplitWeight,
    torch.float32: CopiedWeight,
    torch.int8: CorrectedWeight,
}
