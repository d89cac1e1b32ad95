"""Writes new weights: fp32 and fp64 without rounding, 16-bit weights in one of four ways.

Rounding to nearest loses updates below half the spacing of bf16 numbers (1/256 of the weight).
Stochastic rounding (``rounding``) keeps them on average. A master stores the rounding error beside
the weight: with two more bytes, a bf16 weight is stepped like fp32, with one more byte nearly so.
Edits of weights between steps take effect: see ``fingerprints``.
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
    p: Tensor, s: dict[str, Any], how: RoundingConfig, number: int, shard: Shard, before: int = 0
) -> Weight:
    """The weight that a rule reads and writes: the run ``p``, or a form of it that rounds.

    The parameter's state ``s`` stores a master; this function creates a missing master and drops
    one that ``how`` does not need. Random bits depend on ``number``, the parameter's, and on
    ``s["step"]``. Other ranks have the ``before`` elements that precede the shard's.
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
    """Creates masters, drops them or adapts them to edited weights for a bucket, as ``weight``."""
    found = [
        _prepare(p, s, how)
        for p, s, how in zip(runs, states, hows, strict=True)
        if "master" in s or "marks" in s or (how.weight_update, p.dtype) in MASTER_DTYPES
    ]
    if marked := [x for x in found if x is not None]:
        passes.mend_(marked, are_batched=True)


def _prepare(
    p: Tensor, s: dict[str, Any], how: RoundingConfig
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Creates, drops or converts a master; returns the arguments of ``passes.mend_``, if needed.

    Removes the fingerprints until ``mark`` is called after the step.
    """
    dtype = MASTER_DTYPES.get((how.weight_update, p.dtype))
    if dtype is None:
        drop(s)
    elif "master" not in s:
        s["master"] = master(p, how)["master"]
    elif s["master"].dtype != dtype:  # ``weight_update`` has changed
        flat = Shard.whole((len(p),))
        set_(p, s, how, flat, values(p, s, flat))
    marked = s.pop("marks", None)
    return (p, s["master"], marked) if _needs_marks(s) else None


def _needs_marks(s: dict[str, Any]) -> bool:
    """Whether a state has a master that needs fingerprints to detect edited weights."""
    return "master" in s and s["master"].dtype != torch.float32


def mark_all(runs: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """``mark`` for a bucket."""
    marked = []
    for p, s in zip(runs, states, strict=True):
        if "master" in s and _needs_marks(s):
            s["marks"] = fingerprints.empty_marks(p)
            marked.append((p, s["marks"]))
    if marked:
        passes.mark_(marked, are_batched=True)


def weights(
    runs: Runs,
    masters: Runs | None,
    how: RoundingConfig,
    numbers: NDArray[np.uint32],
    t: int,
    norm_cache: Any = None,
) -> Weights:
    """``weight`` for a batch whose masters, if it needs any, exist already.

    ``numbers`` are the numbers of its parameters, [n]; ``norm_cache`` has the norms of the weights.
    """
    if masters is not None:
        return Weights(runs, MASTERS[masters.dtype].HOW, masters, norm_cache=norm_cache)
    if runs.dtype not in ROUND or how.weight_update == "nearest":
        return Weights(runs, norm_cache=norm_cache)
    return Weights(runs, "STOCHASTIC", key=keys(how.seed, numbers, t), norm_cache=norm_cache)


def mark(p: Tensor, s: dict[str, Any]) -> None:
    """Stores the fingerprints of the run ``p`` in the state ``s`` if its master needs them."""
    if _needs_marks(s):
        s["marks"] = marks(p)


def marks(run: Tensor) -> Tensor:
    """Returns the fingerprints of a 16-bit run [n] on its device, [ceil(n / GROUP)] int16."""
    out = fingerprints.empty_marks(run)
    passes.mark_([(run, out)])
    return out


def master_parts(s: Mapping[str, Any], n: int) -> dict[str, Part]:
    """The expected parts of a state ``s`` under the keys of its master, for n weights."""
    dtype = getattr(s.get("master"), "dtype", None)
    if dtype not in MASTERS:  # the master was cast, if it is one at all
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
    """Whether a tensor has n contiguous elements on a device."""
    return x.numel() == n and x.device == device and x.is_contiguous()


def part(p: Weight, run: slice) -> Weight:
    """Some elements of a run in the same form."""
    return p[run] if isinstance(p, Tensor) else p.part(run)


def master(p: Tensor, how: RoundingConfig) -> dict[str, Tensor]:
    """Returns a new master of a run, with its fingerprints; {} if ``how`` needs none.

    Bytes per weight: 1 for "master24"; for "master" 2 with bf16 and 4 with fp16. A master that is
    no fp32 copy has fingerprints, 2 bytes per ``GROUP`` weights.
    """
    dtype = MASTER_DTYPES.get((how.weight_update, p.dtype))
    if dtype is None:
        return {}
    if dtype == torch.float32:
        return {"master": p.float()}
    return {"master": torch.zeros_like(p, dtype=dtype), "marks": fingerprints.empty_marks(p)}


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
    """Sets a run to ``new``, [len(p)]; with a state ``s``, also its master."""
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
    """Removes a master and its fingerprints from a state."""
    for name in MASTER:
        s.pop(name, None)


def _with_master(p: Tensor, s: dict[str, Any]) -> StoredWeight:
    return MASTERS[s["master"].dtype](p, s["master"])
