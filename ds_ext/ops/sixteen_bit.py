"""Storage of weights: fp32 and fp64 without rounding, 16-bit weights in one of four ways.

Rounding to nearest loses updates below half the spacing of bf16 numbers (1/256 of the weight).
Stochastic rounding (``rounding``) keeps them on average. A master stores the rounding error beside
the weight: with two more bytes, a bf16 weight is stepped like fp32, with one more byte nearly so.
Nothing detects an edit of a weight between steps: its residual stays, and adds at most half the
spacing of the weight's dtype to the new value.

Each class stores a 16-bit run, which is read and written as fp32. Rules call ``block`` and
``write_``. ``write_`` returns the values that the run then has; they may overwrite its argument.
``storage`` describes it to native code and kernels.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.hyperparams import Size
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.rounding import ROUND, key, keys
from ds_ext.ops.runs import ReadByPasses, Runs
from ds_ext.ops.schema import ERROR_LEVELS, HALF, MAX_ERROR_CODE, MAX_INWARD_CODE
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.state import Part, State

WeightUpdate = Literal["stochastic", "nearest", "master", "master24"]


@dataclass(frozen=True)
class RoundingConfig:
    """The hyper-parameters that every optimizer has in addition to its rule's."""

    weight_update: WeightUpdate = "stochastic"  # rounding of 16-bit weights; others are not rounded
    seed: Size = 0  # of the random bits of "stochastic"


# The dtype of a master, by ``weight_update`` and the weight's dtype.
MASTER_DTYPES = {
    ("master", torch.bfloat16): torch.int16,
    ("master", torch.float16): torch.float32,
    ("master24", torch.bfloat16): torch.int8,
    ("master24", torch.float16): torch.int8,
}


@dataclass(frozen=True)
class StochasticWeight(ReadByPasses):
    """A 16-bit run with stochastic rounding of new values."""

    run: Tensor
    key: int
    start: int  # index of the run's first element in the parameter, or in its joined sections

    def storage(self) -> WeightStorage:
        return WeightStorage(self.run, "STOCHASTIC", key=self.key, start=self.start)

    def block(self, b: Block) -> Tensor:
        return self.run[b.run].view(b.shape).float()

    def write_(self, b: Block, new: Tensor) -> Tensor:
        rounded = ROUND[self.run.dtype](new, self.key, self.start + b.run.start)
        self.run[b.run].view(b.shape).copy_(rounded)
        return rounded


@dataclass(frozen=True)
class _Pair(ReadByPasses):
    """A 16-bit run, and a tensor with what its weights lack, one number for each."""

    FORMAT: ClassVar[str]
    run: Tensor
    rest: Tensor

    def storage(self) -> WeightStorage:
        return WeightStorage(self.run, self.FORMAT, self.rest)


@dataclass(frozen=True)
class SplitWeight(_Pair):
    """A bf16 run and an int16 residual, which together hold all bits of an fp32.

    The bf16 is the rounded upper half, ties away from zero; the residual is the signed lower half.
    Every fp32 has one such pair. All NaNs become the NaN with lower half 0, because others would
    round to inf or zero. A sum that is NaN, as of a negative residual and a weight that was set to
    zero since, reads as the weight.
    """

    FORMAT: ClassVar[str] = "SPLIT"

    def block(self, b: Block) -> Tensor:
        run = self.run[b.run].view(b.shape)
        x = run.float()
        x.view(torch.int32).add_(self.rest[b.run].view(b.shape))
        return torch.where(x.isnan(), run, x, out=x)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        new.nan_to_num_(torch.nan, torch.inf, -torch.inf)
        bits = new.view(torch.int32)
        self.rest[b.run].view(b.shape).copy_(bits)  # keeps the low 16 bits
        upper = (bits + 0x8000).bitwise_right_shift_(16)
        self.run[b.run].view(torch.int16).view(b.shape).copy_(upper)
        return new


@dataclass(frozen=True)
class CopiedWeight(_Pair):
    """An fp16 run and its fp32 copy; a copy is used while it still rounds to its weight.

    A 16-bit residual is not enough here, because fp32 has a wider range than fp16. Weights that
    were edited since, for example by loading a model, are read from the run.
    """

    FORMAT: ClassVar[str] = "COPIED"

    def block(self, b: Block) -> Tensor:
        run, copy = self.run[b.run], self.rest[b.run]
        return torch.where(copy.to(run.dtype) == run, copy, run.float()).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        self.rest[b.run].view(b.shape).copy_(new)
        self.run[b.run].view(b.shape).copy_(new)
        return new


INFINITE = 0x7F800000  # the bits of an fp32 infinity


@dataclass(frozen=True)
class CorrectedWeight(_Pair):
    """A 16-bit run, rounded to nearest, and 8 bits of each weight's rounding error.

    The unit of the error is 1/127 of half the spacing of bf16 (or fp16) numbers at the weight, as
    in FlashOptim (arXiv 2602.23349): at most half a unit is lost. ``MAX_ERROR_CODE`` and
    ``HALF`` differ from FlashOptim's code, so that writing the sum of a pair gives the same pair.
    ``MAX_INWARD_CODE`` limits what remains of an overwritten weight, for the same reason.
    """

    FORMAT: ClassVar[str] = "CORRECTED"

    def block(self, b: Block) -> Tensor:
        near = self._near(b)
        x = self.rest[b.run].view(b.shape).float()
        x.clamp_(-MAX_ERROR_CODE, MAX_ERROR_CODE)
        narrow = (near.frexp().mantissa.abs() == 0.5) & (near.signbit() != x.signbit())
        narrow &= near.abs() > torch.finfo(self.run.dtype).smallest_normal
        torch.where(narrow, x.clamp(-MAX_INWARD_CODE, MAX_INWARD_CODE), x, out=x)
        x.mul_(torch.finfo(self.run.dtype).eps / (2 * ERROR_LEVELS))
        return x.mul_(self._power(near).view(torch.float32)).add_(near)

    def write_(self, b: Block, new: Tensor) -> Tensor:
        self.run[b.run].view(b.shape).copy_(new)
        near = self._near(b)
        inverse = self._power(near).neg_().add_(INFINITE).view(torch.float32)  # of half the power
        parts = new.sub_(near).mul_(inverse).mul_(ERROR_LEVELS / torch.finfo(self.run.dtype).eps)
        parts.nan_to_num_(0.0, 0.0, 0.0)  # where the weight is not finite
        parts.add_(torch.sign(parts, out=near), alpha=HALF)
        self.rest[b.run].view(b.shape).copy_(parts)
        return self.block(b)

    def _near(self, b: Block) -> Tensor:
        """The 16-bit weights that the model uses, [mats, rows, cols] fp32."""
        return self.run[b.run].view(b.shape).float()

    def _power(self, near: Tensor) -> Tensor:
        """The bits of the power of two below each weight, at least the smallest normal number."""
        power = near.view(torch.int32) & INFINITE
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

Weight: TypeAlias = Tensor | StoredWeight


def weight(
    p: Tensor, s: State, rounding: RoundingConfig, number: int, shard: Shard, before: int = 0
) -> Weight:
    """The weight that a rule reads and writes: the run ``p``, or a form of it that rounds.

    The parameter's state ``s`` stores a master; this function creates a missing master and drops
    one that ``rounding`` does not need. Random bits depend on ``number``, the parameter's, and on
    ``s["step"]``. Other ranks have the ``before`` elements that precede the shard's.
    """
    prepare(p, s, rounding)
    if "master" in s:
        return _with_master(p, s)
    if p.dtype not in ROUND or rounding.weight_update == "nearest":
        return p
    return StochasticWeight(p, key(rounding.seed, number, s["step"]), before + shard.start)


def prepare(p: Tensor, s: State, rounding: RoundingConfig) -> None:
    """Creates, drops or converts the master of a run in its state ``s``, as ``rounding`` needs."""
    dtype = MASTER_DTYPES.get((rounding.weight_update, p.dtype))
    if dtype is None:
        s.pop("master", None)
    elif "master" not in s:
        s.update(master(p, rounding))
    elif s["master"].dtype != dtype:  # ``weight_update`` has changed
        flat = Shard.whole((len(p),))
        set_(p, s, rounding, flat, values(p, s, flat))


def weights(
    runs: Runs,
    masters: Runs | None,
    rounding: RoundingConfig,
    numbers: NDArray[np.uint32],
    t: int,
    norm_cache: object = None,
) -> WeightStorage:
    """``weight`` for a batch whose masters, if it needs any, exist already.

    ``numbers`` are the numbers of its parameters, [n]; ``norm_cache`` has the norms of the weights.
    """
    if masters is not None:
        return WeightStorage(runs, MASTERS[masters.dtype].FORMAT, masters, norm_cache=norm_cache)
    if runs.dtype not in ROUND or rounding.weight_update == "nearest":
        return WeightStorage(runs, norm_cache=norm_cache)
    return WeightStorage(
        runs, "STOCHASTIC", key=keys(rounding.seed, numbers, t), norm_cache=norm_cache
    )


def master_parts(s: State, n: int) -> dict[str, Part]:
    """The expected part of a state ``s`` under the key of its master, for n weights."""
    if "master" not in s:
        return {}
    dtype = getattr(s["master"], "dtype", None)
    if dtype not in MASTERS:  # the master was cast, if it is one at all
        dtype = torch.float32
    return {"master": Part.of(slice(0, n), n, dtype)}


def part(p: Weight, run: slice) -> Weight:
    """Some elements of a run in the same form."""
    if isinstance(p, Tensor):
        return p[run]
    new: dict[str, Any] = {k: x[run] for k, x in vars(p).items() if isinstance(x, Tensor)}
    if isinstance(p, StochasticWeight):
        new["start"] = p.start + run.start
    return replace(p, **new)


def master(p: Tensor, rounding: RoundingConfig) -> dict[str, Tensor]:
    """Returns a new master of a run; {} if ``rounding`` needs none.

    Bytes per weight: 1 for "master24"; for "master" 2 with bf16 and 4 with fp16.
    """
    dtype = MASTER_DTYPES.get((rounding.weight_update, p.dtype))
    if dtype is None:
        return {}
    return {"master": p.float() if dtype == torch.float32 else torch.zeros_like(p, dtype=dtype)}


def values(p: Tensor, s: State, shard: Shard) -> Tensor:
    """Returns the values of a run: fp32 on the CPU if it has a master, else ``p`` itself."""
    if "master" not in s:
        return p
    held = _with_master(p, s)
    new = torch.empty(len(p), dtype=torch.float32, device="cpu")
    for b in shard.blocks():
        new[b.run].view(b.shape).copy_(held.block(b))
    return new


def set_(p: Tensor, s: State, rounding: RoundingConfig, shard: Shard, new: Tensor) -> None:
    """Sets a run to ``new``, [len(p)]; with a state ``s``, also its master."""
    s.pop("master", None)
    made = master(p, rounding)
    if not s or not made:
        p.copy_(new)
        return
    s.update(made)
    held = _with_master(p, s)
    for b in shard.blocks():
        held.write_(b, new[b.run].to(p.device, torch.float32, copy=True).view(b.shape))


def _with_master(p: Tensor, s: State) -> StoredWeight:
    return MASTERS[s["master"].dtype](p, s["master"])
