"""Ops over one parameter by kernels: each is the pass over a batch of it alone.

An op asks here first. Where its tensors lie on a GPU and a kernel can read all of its runs, the
pass is made here; else the answer is NotImplemented, and the op does it itself. Without Triton
that is always so.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import batched, scratch
from ds_ext.ops.batch import Batch, Runs, Weights
from ds_ext.ops.lazy import read
from ds_ext.ops.shard import Shard
from ds_ext.ops.sources import Number, Source, kept_of, source_of
from ds_ext.ops.triton import devices
from ds_ext.ops.triton.waiting import launch, next_rule, together

__all__ = [
    "apply_",
    "factors_",
    "launch",
    "lerp_",
    "mark_",
    "matrix_square_sums",
    "mend_",
    "next_rule",
    "normalize_whole_rows",
    "square_lerp_",
    "square_sums",
    "squares_",
    "together",
    "tried",
    "weighed_square_sums",
]


def tried(kernel: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an op ask ``kernel``, which takes the same and returns NotImplemented for "do it"."""

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def asked(*args: Any, **numbers: Number) -> Any:
            made = kernel(*args, **numbers)
            if made is NotImplemented:
                launch()  # what the op reads may wait
                return op(*args, **numbers)
            return made

        return asked

    return decorate


def square_sums(runs: Sequence[Any], shard: Shard, like: Any) -> Any:
    """Makes the pass of ``ops.square_sums``."""
    if not all(_reads(source_of(x), like, shard) for x in runs):
        return NotImplemented
    found = batched.square_sums(runs, _alone(shard, like.device), like)
    return [x.values.view(()) for x in found]


def matrix_square_sums(x: Any, shard: Shard, like: Any) -> Any:
    """Makes the pass of ``ops.matrix_square_sums``."""
    if not _takes_matrices(like, shard) or source_of(x) is None:
        return NotImplemented
    row, col = batched.matrix_square_sums(x, _alone(shard, like.device), like)
    return row.view(shard.mats, -1), col.view(shard.mats, -1)


def weighed_square_sums(
    x: Any, before: Tensor, eps: float, beta: float, shard: Shard, like: Any
) -> Any:
    """Makes the pass of ``ops.weighed_square_sums``."""
    if not _takes_matrices(like, shard) or not _is_run(x):
        return NotImplemented
    batch = _alone(shard, like.device)
    found = batched.weighed_square_sums(x, Runs([before.contiguous()]), eps, beta, batch, like)
    return tuple(sums.view(shard.mats, -1) for sums in found)


def normalize_whole_rows(x: Any, least: Number, shard: Shard, like: Any) -> Any:
    """Makes the pass of ``ops.normalize_whole_rows``."""
    if not _takes_matrices(like, shard) or not _is_run(x.x):
        return NotImplemented
    batch = _alone(shard, like.device)
    made, sums = batched.normalize_whole_rows(x, least, batch, like)
    row = made.row.values.view(shard.mats, -1, 1)
    return replace(x, row=row), sums.view(shard.mats, -1)


def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> Any:
    """Makes the pass of ``ops.factors_``."""
    if not _takes_matrices(row, shard) or not shard.numel:
        return NotImplemented
    statistics, batch = (Runs([row]), Runs([col])), _alone(shard, row.device)
    found = batched.factors_(*statistics, sums, eps, beta, clip, batch)
    by_row, by_col = (factors.values.view(shard.mats, -1) for factors in found)
    return by_row.unsqueeze(-1), by_col.unsqueeze(-2)


def squares_(x: Any, shard: Shard, like: Any) -> Any:
    """Makes the pass of ``ops.squares``."""
    if not _reads(source_of(x), like, shard):
        return NotImplemented
    out = torch.zeros(shard.numel, dtype=torch.float32, device=like.device)
    square_lerp_(out[shard.start : shard.stop], x, 0.0, 1.0, shard)
    return out


def lerp_(m: Any, x: Any, weight: float, shard: Shard) -> Any:
    """Makes the pass of ``ops.lerp_``."""
    if not isinstance(m, Tensor) or not _reads(source_of(x), m, shard):
        return NotImplemented
    return batched.lerp_(Runs([m]), x, weight, _alone(shard, m.device))


def square_lerp_(v: Any, x: Any, eps: float, weight: float, shard: Shard) -> Any:
    """Makes the pass of ``ops.square_lerp_``."""
    if not isinstance(v, Tensor) or not _reads(source_of(x), v, shard):
        return NotImplemented
    return batched.square_lerp_(Runs([v]), x, eps, weight, _alone(shard, v.device))


def apply_(p: Any, u: Any, shard: Shard, *, lr: Number, weight_decay: Number = 0.0) -> Any:
    """Makes the pass of ``ops.apply_``."""
    source, kept = source_of(u), kept_of(p)
    if kept is None or not _takes(kept.run, shard):
        return NotImplemented
    if source is None:
        return _apply_slices(p, u, shard, lr, weight_decay)
    if not _reads(source, kept.run, shard):
        return NotImplemented
    if source.kept is not None and (isinstance(weight_decay, Tensor) or weight_decay != 0):
        return NotImplemented
    aux = None if kept.aux is None else Runs([kept.aux])
    weights = Weights(Runs([kept.run]), kept.how, aux, np.array([kept.key], dtype=np.uint32))
    batch = _alone(shard, kept.run.device, kept.start)
    return batched.apply_(weights, u, batch, lr=lr, weight_decay=weight_decay)


def _apply_slices(p: Any, u: Any, shard: Shard, lr: Number, weight_decay: Number) -> None:
    """The same of what no kernel reads, such as products of matrices: slice by slice in fp32."""
    launch()  # what it reads may wait
    for b in scratch.blocks(shard, scratch.SLICE):
        values = read(u, b).reshape(-1)
        run = p[b.run] if isinstance(p, Tensor) else p.part(b.run)
        apply_(run, values, Shard.whole((len(values),)), lr=lr, weight_decay=weight_decay)
        launch()  # so that one slice is alive at a time


def mark_(run: Tensor, out: Tensor) -> Any:
    """Makes the pass of ``edits._mark_``."""
    return batched.mark_all([(run, out)]) if devices.take(run.device) else NotImplemented


def mend_(run: Tensor, residual: Tensor, marked: Tensor | None) -> Any:
    """Makes the pass of ``edits.mend_``."""
    if not devices.take(run.device):
        return NotImplemented
    return batched.mend_all_([(run, residual, marked)])


@functools.lru_cache(4096)
def _alone(shard: Shard, device: torch.device, first: int | None = None) -> Batch:
    """A parameter as a batch, whose noise is that of elements ``first`` and on if it is given."""
    return Batch([shard], None if first is None else [first], device)


def _takes(like: Any, shard: Shard) -> bool:
    """Whether kernels take a run of ``shard`` with the device and dtype of ``like``."""
    if not devices.take(like.device) or like.dtype == torch.float64:
        return False
    return shard.split is None or len(list(shard.pieces())) < 2


def _takes_matrices(like: Any, shard: Shard) -> bool:
    """The same of sums over rows and columns, and of quotients by them."""
    return devices.take_matrices(shard) and _takes(like, shard)


def _reads(source: Source | None, like: Any, shard: Shard) -> bool:
    """Whether a kernel can read this."""
    if source is None:
        return False
    return (_takes_matrices if source.is_by_matrix else _takes)(like, shard)


def _is_run(x: Any) -> bool:
    """Whether this is a run as it is, which may be scaled and bounded."""
    source = source_of(x)
    return source is not None and source.form == "IS_RUN"
