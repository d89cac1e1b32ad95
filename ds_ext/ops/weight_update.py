"""How a new weight is written back: fp32 and fp64 as it is, 16 bits in one of four ways.

Rounded to nearest, a bf16 weight does not move by less than half its spacing (1/256 of it), and
small updates are lost; rounded up or down at random (``rounding``) it moves by them on average. A
master keeps, beside the weight, what rounding takes from it: a bf16 weight is stepped as if it were
fp32 for two bytes more, or nearly so for one. Weights that others change between steps are taken
as they are: see ``fingerprints``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ds_ext.hyperparams import Size
from ds_ext.ops import fingerprints, passes, scratch
from ds_ext.ops.batch import MASTER as MASTER
from ds_ext.ops.batch import Runs, Weights
from ds_ext.ops.rounding import ROUND, key, keys
from ds_ext.ops.schema import GROUP
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part
from ds_ext.ops.weight_forms import MASTERS, Form, StochasticWeight

WeightUpdate = Annotated[
    Literal["stochastic", "nearest", "master", "master24"],
    Field(description='"stochastic", "nearest", "master" or "master24"'),
]


@dataclass(frozen=True)
class RoundingConfig:
    """The hyper-parameters that every optimizer has beside its rule's."""

    weight_update: WeightUpdate = "stochastic"  # how a 16-bit weight is rounded; no other is
    seed: Size = 0  # of the random bits of "stochastic"


# What is kept beside a weight, by its dtype and how it is written.
MASTER_DTYPES = {
    ("master", torch.bfloat16): torch.int16,
    ("master", torch.float16): torch.float32,
    ("master24", torch.bfloat16): torch.int8,
    ("master24", torch.float16): torch.int8,
}

Weight: TypeAlias = Tensor | Form


def weight(
    p: Tensor, s: dict[str, Any], how: RoundingConfig, number: int, shard: Shard, before: int = 0
) -> Weight:
    """What a rule reads and writes as its weight: the run ``p``, or one that rounds.

    A master is kept in the parameter's state ``s``, made here where it is missing and dropped
    where it is not asked for. ``number`` tells parameters apart and ``s["step"]`` their steps.
    Other ranks have ``before`` elements of it, which precede the shard's.
    """
    if marked := _prepare(p, s, how):
        passes.mend_([marked])
    if "master" in s:
        return _with_master(p, s)
    if p.dtype not in ROUND or how.weight_update == "nearest":
        return p
    return StochasticWeight(p, key(how.seed, number, s["step"]), before + shard.start)


def prepare_all(
    runs: Sequence[Tensor], states: Sequence[dict[str, Any]], hows: Sequence[RoundingConfig]
) -> None:
    """Makes masters, drops them or adapts them to edited weights, as ``weight``, for a bucket."""
    of_each = zip(runs, states, hows, strict=True)
    found = [_prepare(p, s, how) for p, s, how in of_each if p.dtype in ROUND or "master" in s]
    if marked := [x for x in found if x is not None]:
        passes.mend_(marked, are_batched=True)


def _prepare(
    p: Tensor, s: dict[str, Any], how: RoundingConfig
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Makes a master, drops it or makes it anew in another form -> what ``passes.mend_`` takes.

    Marks are dropped until ``mark`` is called after the step.
    """
    dtype = MASTER_DTYPES.get((how.weight_update, p.dtype))
    if dtype is None:
        drop(s)
    elif "master" not in s:
        s["master"] = master(p, how)["master"]
    elif s["master"].dtype != dtype:  # another way was chosen since
        flat = Shard.whole((len(p),))
        set_(p, s, how, flat, values(p, s, flat))
    marked = s.pop("marks", None)
    return (p, s["master"], marked) if _needs_marks(s) else None


def _needs_marks(s: dict[str, Any]) -> bool:
    """Whether a state has a master that cannot tell by itself that its weights were edited."""
    return "master" in s and s["master"].dtype != torch.float32


def mark_all(runs: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """``mark`` for a bucket."""
    marked = []
    for p, s in zip(runs, states, strict=True):
        if _needs_marks(s):
            s["marks"] = fingerprints.room(p)
            marked.append((p, s["marks"]))
    if marked:
        passes.mark_(marked, are_batched=True)


def weights(
    runs: Runs, masters: Runs | None, how: RoundingConfig, numbers: NDArray[np.uint64], t: int
) -> Weights:
    """The same as ``weight`` for a batch, its masters being there if there are any.

    ``numbers`` tell its parameters apart, [n].
    """
    if masters is not None:
        return Weights(runs, MASTERS[masters.dtype].HOW, masters)
    if runs.dtype not in ROUND or how.weight_update == "nearest":
        return Weights(runs)
    return Weights(runs, "STOCHASTIC", key=keys(how.seed, numbers, t))


def mark(p: Tensor, s: dict[str, Any]) -> None:
    """Notes in the state ``s`` that its master belongs to what the run ``p`` is now."""
    if _needs_marks(s):
        s["marks"] = marks(p)


def marks(run: Tensor) -> Tensor:
    """Returns the fingerprints of a 16-bit run [n], on its device, [ceil(n / GROUP)] int16."""
    out = fingerprints.room(run)
    passes.mark_([(run, out)])
    return out


def master_parts(s: Mapping[str, Any], n: int) -> dict[str, Part]:
    """What a state ``s`` has to keep under the keys of its master, beside n weights."""
    dtype = getattr(s.get("master"), "dtype", None)
    if dtype not in MASTERS:  # one that was cast, if it is a master at all
        dtype = torch.float32
    sizes = {"master": (n, dtype), "marks": (-(-n // GROUP), torch.int16)}
    return {
        key: Part.of(slice(0, size), size, kind) for key, (size, kind) in sizes.items() if key in s
    }


def has_fitting_master(p: Tensor, s: Mapping[str, Any]) -> bool:
    """Returns whether the master of a 16-bit run, and its fingerprints, have the run's size."""
    held, marked = s["master"], s.get("marks")
    if held.dtype not in MASTERS or not _lies(held, p.numel(), p.device):
        return False
    if marked is None:
        return True
    return marked.dtype == torch.int16 and _lies(marked, -(-p.numel() // GROUP), p.device)


def _lies(x: Tensor, n: int, device: torch.device) -> bool:
    """Whether a tensor is n elements on a device, one after another."""
    return x.numel() == n and x.device == device and x.is_contiguous()


def part(p: Weight, run: slice) -> Weight:
    """Some elements of a run, to be read and written as they are in it."""
    return p[run] if isinstance(p, Tensor) else p.part(run)


def master(p: Tensor, how: RoundingConfig) -> dict[str, Tensor]:
    """Returns what is stored beside a run to have its weights in more than 16 bits.

    Per weight: 1 byte for "master24"; for "master" 2 bytes beside bf16 and 4 beside fp16. Without
    an fp32 copy, also 2 bytes per ``GROUP`` weights.
    """
    dtype = MASTER_DTYPES.get((how.weight_update, p.dtype))
    if dtype is None:
        return {}
    if dtype == torch.float32:
        return {"master": p.float()}
    return {"master": torch.zeros_like(p, dtype=dtype), "marks": fingerprints.room(p)}


def values(p: Tensor, s: dict[str, Any], shard: Shard) -> Tensor:
    """Returns the values of a run: fp32 on the CPU if it has a master, else ``p`` itself."""
    if "master" not in s:
        return p
    if _needs_marks(s):
        s = {"master": s["master"].clone(), "marks": s.get("marks")}
        passes.mend_([(p, s["master"], s["marks"])])
    held = _with_master(p, s)
    new = torch.empty(len(p), dtype=torch.float32, device="cpu")
    for b in scratch.blocks(shard):
        new[b.run].view(b.shape).copy_(held.block(b))
    return new


def set_(p: Tensor, s: dict[str, Any], how: RoundingConfig, shard: Shard, new: Tensor) -> None:
    """Makes ``new``, [len(p)], what a run is; with a state ``s``, also what its master holds."""
    drop(s)
    made = master(p, how)
    if not s or not made:
        p.copy_(new)
        return
    s.update(made)
    held = _with_master(p, s)
    for b in scratch.blocks(shard):
        held.write_(b, new[b.run].to(p.device, torch.float32, copy=True).view(b.shape))
    mark(p, s)


def drop(s: dict[str, Any]) -> None:
    """Takes a master out of a state."""
    for name in MASTER:
        s.pop(name, None)


def _with_master(p: Tensor, s: dict[str, Any]) -> Form:
    return MASTERS[s["master"].dtype](p, s["master"])
