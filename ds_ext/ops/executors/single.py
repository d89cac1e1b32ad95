"""Passes over one parameter: each is a pass over a batch of one.

This executor makes a pass if there is native code (on a CPU) or Triton (on a GPU), and if these can
read all of its tensors.
"""

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import passes, schema, scratch
from ds_ext.ops.batch import Runs, Weights
from ds_ext.ops.dispatch import Makers
from ds_ext.ops.executors import batched
from ds_ext.ops.executors.native.native_table import NativeTable
from ds_ext.ops.executors.table_batch import TableBatch, Unsupported, supports, weight_columns
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.expressions import Number, Source, read, source_of, storage_of
from ds_ext.ops.products import Product
from ds_ext.ops.shard import Shard

_makers = Makers()


class SingleKernels:
    """The executor of passes over one parameter by native code or kernels."""

    def run(self, asked: Any, where: Any) -> Any:
        """See ``dispatch.Executor``."""
        make = _makers.get(type(asked))
        if make is None:
            return NotImplemented
        try:
            return make(*asked, where)
        except Unsupported:
            return NotImplemented


@_makers.makes(passes.SquareSums)
def square_sums(runs: Sequence[Any], like: Any, shard: Shard) -> Any:
    """The pass ``ops.square_sums``."""
    if not all(_reads(source_of(x), like, shard) for x in runs):
        return NotImplemented
    found = batched.square_sums(runs, like, _alone(shard, like.device))
    return [x.view(()) for x in found]


@_makers.makes(passes.RowColSums)
def row_col_square_sums(x: Any, like: Any, shard: Shard) -> Any:
    """The pass ``ops.row_col_square_sums``."""
    if not _takes_matrices(like, shard) or source_of(x) is None:
        return NotImplemented
    row, col = batched.row_col_square_sums(x, like, _alone(shard, like.device))
    return row.view(shard.mats, shard.rows), col.view(shard.mats, shard.cols)


@_makers.makes(passes.WeightedRowColSums)
def weighted_square_sums(
    x: Any, before: Tensor, eps: float, beta: float, like: Any, shard: Shard
) -> Any:
    """The pass ``ops.weighted_square_sums``."""
    if not _takes_matrices(like, shard) or not _is_run(x):
        return NotImplemented
    batch = _alone(shard, like.device)
    found = batched.weighted_square_sums(x, Runs([before.contiguous()]), eps, beta, like, batch)
    return tuple(sums.view(shard.mats, -1) for sums in found)


@_makers.makes(passes.NormalizeWholeRows)
def normalize_whole_rows(x: Any, least: Number, like: Any, shard: Shard) -> Any:
    """The pass ``ops.normalize_whole_rows``."""
    if not _takes_matrices(like, shard) or not _is_run(x.x):
        return NotImplemented
    batch = _alone(shard, like.device)
    made, sums = batched.normalize_whole_rows(x, least, like, batch)
    row = made.row.values.view(shard.mats, -1, 1)
    return replace(made, row=row), sums.view(shard.mats, -1)


@_makers.makes(passes.Factors)
def factors_(row: Tensor, col: Tensor, *more: Any) -> Any:
    """The pass ``ops.factors_``; ``more`` are its further arguments."""
    sums, eps, beta, clip, shard = more
    if not _takes_matrices(row, shard):
        return NotImplemented
    batch = _alone(shard, row.device)
    found = batched.factors_(Runs([row]), Runs([col]), sums, eps, beta, clip, batch)
    by_row, by_col = (factors.values.view(shard.mats, -1) for factors in found)
    return by_row.unsqueeze(-1), by_col.unsqueeze(-2)


@_makers.makes(passes.ScatteredSquares)
def scattered_squares(x: Any, like: Any, shard: Shard) -> Any:
    """The pass ``ops.scattered_squares``."""
    if not _reads(source_of(x), like, shard):
        return NotImplemented
    out = torch.zeros(shard.numel, dtype=torch.float32, device=like.device)
    passes.square_lerp_(out[shard.start : shard.stop], x, 0.0, 1.0, shard)
    return out


@_makers.makes(passes.Lerp)
def lerp_(m: Any, x: Any, weight: float, shard: Shard) -> Any:
    """The pass ``ops.lerp_``."""
    if not isinstance(m, Tensor) or not _reads(source_of(x), m, shard):
        return NotImplemented
    return batched.lerp_(Runs([m]), x, weight, _alone(shard, m.device))


@_makers.makes(passes.SquareLerp)
def square_lerp_(v: Any, x: Any, eps: float, weight: float, shard: Shard) -> Any:
    """The pass ``ops.square_lerp_``."""
    if not isinstance(v, Tensor) or not _reads(source_of(x), v, shard):
        return NotImplemented
    return batched.square_lerp_(Runs([v]), x, eps, weight, _alone(shard, v.device))


@_makers.makes(passes.Apply)
def apply_(p: Any, u: Any, lr: Number, weight_decay: Number, shard: Shard) -> Any:
    """The pass ``ops.apply_``."""
    source, weight = source_of(u), storage_of(p)
    if weight is None or not _takes(weight.run, shard):
        return NotImplemented
    product = None
    if isinstance(u, Product) and u.is_native and shard.split is None:
        if not devices.supports(weight.run.device) and u.covers(shard):
            product = u.left, u.right, u.first
    if source is None and product is None:
        return _apply_slices(p, u, shard, weight.run.device, lr, weight_decay)
    if source is not None and not _reads(source, weight.run, shard):
        return NotImplemented
    is_decayed = isinstance(weight_decay, Tensor) or weight_decay != 0
    if source is not None and source.storage is not None and is_decayed:
        return NotImplemented
    aux = None if weight.aux is None else Runs([weight.aux])
    run, key = Runs([weight.run]), np.array([weight.key], dtype=np.uint32)
    batch = _alone(shard, weight.run.device, weight.start)
    weights = Weights(run, weight.how, aux, key)
    if product is None:
        return batched.apply_(weights, u, lr, weight_decay, batch)
    columns = {**weight_columns(batch, weights), "lr": lr, "decay": weight_decay}
    storage, table = (weight.how, weight.run.dtype), cast(NativeTable, batch.own)
    return table.run("apply", columns, "IS_RUN", None, storage, is_decayed, product=product)


def _apply_slices(
    p: Any, u: Any, shard: Shard, device: torch.device, lr: Number, weight_decay: Number
) -> None:
    """``apply_`` for updates that no table reads, such as matrix products: by slices in fp32."""
    for b in scratch.blocks(shard, scratch.product_limit(device)):
        values = read(u, b).reshape(-1)
        run = p[b.run] if isinstance(p, Tensor) else p.part(b.run)
        passes.apply_(run, values, Shard.whole((len(values),)), lr=lr, weight_decay=weight_decay)


def _alone(shard: Shard, device: torch.device, first: int | None = None) -> TableBatch:
    """A parameter as a batch of one; its random bits count from element ``first`` if given.

    A pass fills the columns of its batch's table, so each thread has its own batches.
    """
    return _batch_of(shard, device, first, threading.get_ident())


@functools.lru_cache(4096)
def _batch_of(shard: Shard, device: torch.device, first: int | None, thread: int) -> TableBatch:
    return TableBatch([shard], None if first is None else [first], device)


def _takes(like: Any, shard: Shard) -> bool:
    """Whether tables support a run of ``shard`` with the device and dtype of ``like``."""
    if not supports(like.device) or like.dtype == torch.float64:
        return False
    return shard.numel > 0 and (shard.split is None or len(list(shard.pieces())) < 2)


def _takes_matrices(like: Any, shard: Shard) -> bool:
    """Whether tables also support its row and column sums, and quotients by them."""
    return devices.supports_matrices(shard) and _takes(like, shard)


def _reads(source: Source | None, like: Any, shard: Shard) -> bool:
    """Whether a table can read an input."""
    if source is None or "x" in source.tensors and source.tensors["x"].dtype not in schema.DTYPES:
        return False
    return (_takes_matrices if source.is_by_matrix else _takes)(like, shard)


def _is_run(x: Any) -> bool:
    """Whether an input is a plain run, which may be scaled and bounded."""
    source = source_of(x)
    return source is not None and source.form == "IS_RUN"
