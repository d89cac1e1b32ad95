"""Writes new weights: fp32 and fp64 without rounding, 16-bit weights in one of four ways.

Rounding to nearest loses updates below half the spacing of bf16 numbers (1/256 of the weight).
Stochastic rounding (``rounding``) keeps them on average. A master stores the rounding error beside
the weight: with two more bytes, a bf16 weight is stepped like fp32, with one more byte nearly so.
Nothing detects an edit of a weight between steps: its residual stays, and adds at most half the
spacing of the weight's dtype to the new value.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ds_ext.hyperparams import Size
from ds_ext.ops import scratch
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.rounding import ROUND, key, keys
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, State
from ds_ext.ops.weight_storage import MASTERS, StochasticWeight, StoredWeight

WeightUpdate = Annotated[
    Literal["stochastic", "nearest", "master", "master24"],
    Field(description='"stochastic", "nearest", "master" or "master24"'),
]


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

Weight: TypeAlias = Tensor | StoredWeight


def weight(
    p: Tensor, s: State, how: RoundingConfig, number: int, shard: Shard, before: int = 0
) -> Weight:
    """The weight that a rule reads and writes: the run ``p``, or a form of it that rounds.

    The parameter's state ``s`` stores a master; this function creates a missing master and drops
    one that ``how`` does not need. Random bits depend on ``number``, the parameter's, and on
    ``s["step"]``. Other ranks have the ``before`` elements that precede the shard's.
    """
    prepare(p, s, how)
    if "master" in s:
        return _with_master(p, s)
    if p.dtype not in ROUND or how.weight_update == "nearest":
        return p
    return StochasticWeight(p, key(how.seed, number, s["step"]), before + shard.start)


def prepare(p: Tensor, s: State, how: RoundingConfig) -> None:
    """Creates, drops or converts the master of a run in its state ``s``, as ``how`` needs it."""
    dtype = MASTER_DTYPES.get((how.weight_update, p.dtype))
    if dtype is None:
        s.pop("master", None)
    elif "master" not in s:
        s.update(master(p, how))
    elif s["master"].dtype != dtype:  # ``weight_update`` has changed
        flat = Shard.whole((len(p),))
        set_(p, s, how, flat, values(p, s, flat))


def weights(
    runs: Runs,
    masters: Runs | None,
    how: RoundingConfig,
    numbers: NDArray[np.uint32],
    t: int,
    norm_cache: object = None,
) -> WeightStorage:
    """``weight`` for a batch whose masters, if it needs any, exist already.

    ``numbers`` are the numbers of its parameters, [n]; ``norm_cache`` has the norms of the weights.
    """
    if masters is not None:
        return WeightStorage(runs, MASTERS[masters.dtype].HOW, masters, norm_cache=norm_cache)
    if runs.dtype not in ROUND or how.weight_update == "nearest":
        return WeightStorage(runs, norm_cache=norm_cache)
    return WeightStorage(runs, "STOCHASTIC", key=keys(how.seed, numbers, t), norm_cache=norm_cache)


def master_parts(s: State, n: int) -> dict[str, Part]:
    """The expected part of a state ``s`` under the key of its master, for n weights."""
    if "master" not in s:
        return {}
    dtype = getattr(s["master"], "dtype", None)
    if dtype not in MASTERS:  # the master was cast, if it is one at all
        dtype = torch.float32
    return {"master": Part.of(slice(0, n), n, dtype)}


def has_fitting_master(p: Tensor, s: State) -> bool:
    """Returns whether the master of a 16-bit run has the run's size."""
    held = s["master"]
    is_alike = held.dtype in MASTERS and held.device == p.device
    return is_alike and held.numel() == p.numel() and held.is_contiguous()


def part(p: Weight, run: slice) -> Weight:
    """Some elements of a run in the same form."""
    return p[run] if isinstance(p, Tensor) else p.part(run)


def master(p: Tensor, how: RoundingConfig) -> dict[str, Tensor]:
    """Returns a new master of a run; {} if ``how`` needs none.

    Bytes per weight: 1 for "master24"; for "master" 2 with bf16 and 4 with fp16.
    """
    dtype = MASTER_DTYPES.get((how.weight_update, p.dtype))
    if dtype is None:
        return {}
    return {"master": p.float() if dtype == torch.float32 else torch.zeros_like(p, dtype=dtype)}


def values(p: Tensor, s: State, shard: Shard) -> Tensor:
    """Returns the values of a run: fp32 on the CPU if it has a master, else ``p`` itself."""
    if "master" not in s:
        return p
    held = _with_master(p, s)
    new = torch.empty(len(p), dtype=torch.float32, device="cpu")
    for b in scratch.blocks(shard):
        new[b.run].view(b.shape).copy_(held.block(b))
    return new


def set_(p: Tensor, s: State, how: RoundingConfig, shard: Shard, new: Tensor) -> None:
    """Sets a run to ``new``, [len(p)]; with a state ``s``, also its master."""
    s.pop("master", None)
    made = master(p, how)
    if not s or not made:
        p.copy_(new)
        return
    s.update(made)
    held = _with_master(p, s)
    for b in scratch.blocks(shard):
        held.write_(b, new[b.run].to(p.device, torch.float32, copy=True).view(b.shape))


def _with_master(p: Tensor, s: State) -> StoredWeight:
    return MASTERS[s["master"].dtype](p, s["master"])
