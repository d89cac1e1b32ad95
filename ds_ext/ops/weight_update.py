"""How a new weight is written back: fp32 and fp64 as it is, 16 bits in one of three ways.

Rounded to nearest, a bf16 weight does not move by less than half its spacing (1/256 of it), and
small updates are lost; rounded up or down at random (``rounding``) it moves by them on average. A
master keeps, beside the weight, what rounding takes from it: a bf16 weight is stepped as if it were
fp32 for two bytes more. Weights that others change between steps are taken as they are: see
``edits``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ds_ext.hyperparams import Size
from ds_ext.ops import edits, scratch
from ds_ext.ops.batch import MASTER as MASTER
from ds_ext.ops.batch import Runs, Weights
from ds_ext.ops.native import passes as native
from ds_ext.ops.rounding import ROUND, key, keys
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.sources import Kept

WeightUpdate = Annotated[
    Literal["stochastic", "nearest", "master"],
    Field(description='"stochastic", "nearest" or "master"'),
]


@dataclass(frozen=True)
class Writing:
    """The hyper-parameters that every optimizer has beside its rule's."""

    weight_update: WeightUpdate = "stochastic"  # how a 16-bit weight is rounded; no other is
    seed: Size = 0  # of the random bits of "stochastic"


# Runs of 16 bits, read and written as fp32. ``write_`` returns what they then hold, which may lie
# where the new values were. ``part`` is the same of some of their elements.


@dataclass(frozen=True)
class StochasticWeight:
    """A 16-bit run that rounds what is written to it, up or down at random."""

    run: Tensor
    key: int  # 32 bits
    start: int  # element of the whole parameter that the run starts at

    def kept(self) -> Kept:
        """Returns what this is to a kernel."""
        return Kept(self.run, "STOCHASTIC", key=self.key)

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

    run: Tensor
    residual: Tensor

    def kept(self) -> Kept:
        """Returns what this is to a kernel."""
        return Kept(self.run, "SPLIT", self.residual)

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
    """An fp16 run and its fp32 copy, which counts where the run is still what was made of it.

    No 16 bits would do here: an fp32 has a wider range than fp16. Weights that someone else has
    changed since, say by loading a model, are taken from the run.
    """

    run: Tensor
    copy: Tensor

    def kept(self) -> Kept:
        """Returns what this is to a kernel."""
        return Kept(self.run, "COPIED", self.copy)

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


Weight: TypeAlias = Tensor | StochasticWeight | SplitWeight | CopiedWeight


def weight(
    p: Tensor, s: dict[str, Any], how: Writing, number: int, shard: Shard, before: int = 0
) -> Weight:
    """What a rule reads and writes as its weight: the run ``p``, or one that rounds.

    A master is kept in the parameter's state ``s``, made here where it is missing and dropped
    where it is not asked for. ``number`` tells parameters apart and ``s["step"]`` their steps.
    Other ranks have ``before`` elements of it, which precede the shard's.
    """
    marked = s.pop("marks", None)  # until ``mark`` is called after the step
    if how.weight_update != "master":
        s.pop("master", None)
    elif "master" not in s:
        s |= {k: x for k, x in master(p, how).items() if k == "master"}
    elif p.dtype == torch.bfloat16:
        edits.mend_(p, s["master"], marked)
    if p.dtype not in ROUND or how.weight_update == "nearest":
        return p
    if how.weight_update == "stochastic":
        return StochasticWeight(p, key(how.seed, number, s["step"]), before + shard.start)
    return _with_master(p, s)


def prepare_all(
    runs: Sequence[Tensor], states: Sequence[dict[str, Any]], hows: Sequence[Writing]
) -> None:
    """Makes masters, drops them or adapts them to edited weights, as ``weight``, for a bucket."""
    mended = []
    for p, s, how in zip(runs, states, hows, strict=True):
        marked = s.pop("marks", None)
        if how.weight_update != "master":
            s.pop("master", None)
        elif "master" not in s:
            s |= {k: x for k, x in master(p, how).items() if k == "master"}
        elif p.dtype == torch.bfloat16:
            mended.append((p, s["master"], marked))
    if mended:
        native.mend_all_(mended)


def mark_all(runs: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """``mark`` for a bucket."""
    marked = []
    for p, s in zip(runs, states, strict=True):
        if "master" in s and p.dtype == torch.bfloat16:
            s["marks"] = edits.room(p)
            marked.append((p, s["marks"]))
    if marked:
        native.mark_all(marked)


def weights(
    runs: Runs, masters: Runs | None, how: Writing, numbers: NDArray[np.uint64], t: int
) -> Weights:
    """The same as ``weight`` for a batch, its masters being there if there are any.

    ``numbers`` tell its parameters apart, [n].
    """
    if runs.dtype not in ROUND or how.weight_update == "nearest":
        return Weights(runs)
    if how.weight_update == "stochastic":
        return Weights(runs, "STOCHASTIC", keys=keys(how.seed, numbers, t))
    return Weights(runs, "SPLIT" if runs.dtype == torch.bfloat16 else "COPIED", masters)


def mark(p: Tensor, s: dict[str, Any]) -> None:
    """Notes in the state ``s`` that its master belongs to what the run ``p`` is now."""
    if "master" in s and p.dtype == torch.bfloat16:
        s["marks"] = edits.marks(p)


def part(p: Weight, run: slice) -> Weight:
    """Some elements of a run, to be read and written as they are in it."""
    return p[run] if isinstance(p, Tensor) else p.part(run)


def master(p: Tensor, how: Writing) -> dict[str, Tensor]:
    """What is kept beside a run to have its weights in fp32: 2 bytes for a bf16, 4 for an fp16.

    And 2 for every ``edits.GROUP`` bf16 weights.
    """
    if p.dtype not in ROUND or how.weight_update != "master":
        return {}
    if p.dtype == torch.bfloat16:
        return {"master": torch.zeros_like(p, dtype=torch.int16), "marks": edits.room(p)}
    return {"master": p.float()}


def values(p: Tensor, s: dict[str, Any], shard: Shard) -> Tensor:
    """What a run ``p`` is: fp32 where it has a master, or itself."""
    if "master" not in s:
        return p
    if p.dtype == torch.bfloat16:
        s = {"master": s["master"].clone(), "marks": s.get("marks")}
        edits.mend_(p, s["master"], s["marks"])
    held = _with_master(p, s)
    new = torch.empty(len(p), dtype=torch.float32, device="cpu")
    for b in scratch.blocks(shard):
        new[b.run].view(b.shape).copy_(held.block(b))
    return new


def set_(p: Tensor, s: dict[str, Any], how: Writing, shard: Shard, new: Tensor) -> None:
    """Makes ``new``, [len(p)], what a run is; with a state ``s``, also what its master holds."""
    for name in MASTER:
        s.pop(name, None)
    made = master(p, how)
    if not s or not made:
        p.copy_(new)
        return
    s.update(made)
    held = _with_master(p, s)
    for b in scratch.blocks(shard):
        held.write_(b, new[b.run].to(p.device, torch.float32).view(b.shape))
    mark(p, s)


def _with_master(p: Tensor, s: dict[str, Any]) -> SplitWeight | CopiedWeight:
    return (SplitWeight if p.dtype == torch.bfloat16 else CopiedWeight)(p, s["master"])
