"""Passes over a batch: the arguments of a pass become columns of a table, which makes the pass.

A table calls native code on a CPU and kernels on a GPU. ``Runs`` and ``Weights`` replace the
tensors of a pass, and vectors [n] replace its numbers. A tensor is the run of a batch of one.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import passes, schema
from ds_ext.ops.batch import Flat, Runs, Shifted, Weights
from ds_ext.ops.dispatch import Makers
from ds_ext.ops.executors.table_batch import (
    AnyTable,
    TableBatch,
    Unsupported,
    checked,
    inputs,
    new_table,
    supports,
    weight_columns,
)
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.executors.triton.kernel_table import KernelTable as KernelTable
from ds_ext.ops.executors.triton.launcher import SquareParts
from ds_ext.ops.expressions import Number, Quotient, Source, source_of

_makers = Makers()


class BatchedExecutor:
    """The executor of passes over batches."""

    def run(self, asked: Any, where: Any) -> Any:
        """See ``dispatch.Executor``."""
        make = _makers.get(type(asked))
        if make is None:
            return NotImplemented
        try:
            return make(*asked) if where is None else make(*asked, where)
        except Unsupported:
            return NotImplemented


@_makers.makes(passes.SquareSums)
def square_sums(runs: Sequence[Any], like: Any, batch: TableBatch) -> list[Any]:
    """Sums of squares -> [n] each. On a CPU, two inputs with the same weights share a pass."""
    sources = [_source(x) for x in runs]
    for x in sources if len(sources) > 1 else ():  # before one of them advances moments
        _refuse("square_sums", batch.own, x.form, x.scalars)
        inputs(batch, x)
    totals = [batch.own.zeros(len(batch)) for _ in runs]
    weights = [i for i, x in enumerate(sources) if x.form == "IS_WEIGHT"]
    if len(sources) == 2 and len(weights) == 1 and batch.own.fuses_squares and _same(*sources):
        own, other = totals[weights[0]], totals[1 - weights[0]]
        _run("square_sums", batch, sources[1 - weights[0]], out=_each(other), out2=_each(own))
        return totals
    for source, total in zip(sources, totals, strict=True):
        cache: Any = source.form == "IS_WEIGHT" and getattr(source.storage, "norm_cache", None)
        more = {"norm_cache": cache} if cache else {}
        _run("square_sums", batch, source, out=_each(total), **more)
    return totals


@_makers.makes(passes.FlatSquareSums)
def square_sums_of(runs: Sequence[Tensor]) -> Tensor:
    """Sums of squares of flat tensors of one dtype -> [n]."""
    if not takes(runs):
        raise Unsupported
    return _each_of("square_sums", runs)


@_makers.makes(passes.Largest)
def largest(runs: Sequence[Tensor]) -> Tensor:
    """The largest magnitudes of flat tensors of one dtype, inf if there is a NaN -> [n]."""
    if not takes(runs) or devices.supports(runs[0].device):  # there is no kernel for this pass
        raise Unsupported
    return _each_of("largest", runs)


def takes(runs: Sequence[Tensor]) -> bool:
    """Whether one table can read these flat tensors."""
    kinds = {(x.dtype, x.device) for x in runs}
    if len(kinds) > 1 or not all(x.is_contiguous() for x in runs):
        return False
    ((dtype, device),) = kinds
    return dtype in schema.DTYPES and supports(device)


def _each_of(name: str, runs: Sequence[Tensor]) -> Tensor:
    totals = torch.zeros(len(runs), dtype=torch.float32, device=runs[0].device)
    columns = {"x": Runs(runs), "out": _each(totals)}
    _flat(runs).run(name, columns, "IS_RUN", runs[0].dtype)
    return totals


@_makers.makes(passes.RowColSums)
def row_col_square_sums(x: Any, like: Any, batch: TableBatch) -> tuple[Tensor, Tensor]:
    """Sums of squares over rows and columns -> [rows of all], [columns of all]."""
    row, col = _sums(batch, batch.all_rows, batch.all_cols)
    left = _run(
        "row_col_sums",
        batch,
        _source(x),
        out=Flat(row, batch.own_row_firsts),
        out2=Flat(col, batch.own_col_firsts),
    )
    _keep_square_parts(x, left or Flat(row, batch.row_firsts), batch)
    return row, col


@_makers.makes(passes.WeightedRowColSums)
def weighted_square_sums(
    x: Any, before: Runs, eps: float, beta: float, like: Any, batch: TableBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """Row sums, column sums, and column sums of squares divided by their row's new statistic."""
    row, col, weighted = _sums(batch, batch.all_rows, batch.all_cols, batch.all_cols)
    left = _run(
        "weighted_sums",
        batch,
        _source(x),
        out=Flat(row, batch.own_row_firsts),
        out2=Flat(col, batch.own_col_firsts),
        out3=Flat(weighted, batch.own_col_firsts),
        before=Shifted(checked(before, batch, batch.row_sizes), batch.row_offsets),
        lerp=1 - beta,
        eps=eps,
    )
    _keep_square_parts(x, left or Flat(row, batch.row_firsts), batch)
    return row, col, weighted


def _keep_square_parts(x: Any, left: Flat | SquareParts, batch: TableBatch) -> None:
    """If ``x`` is the gradients of the batch, keeps partial sums of their squares."""
    if x is batch.gradients:
        batch.square_parts = left


def added_up(batch: TableBatch) -> Any:
    """Sums of squares of gradients, [n], from partial sums of an earlier pass; None without any."""
    left = batch.square_parts
    if isinstance(left, SquareParts):
        return cast(KernelTable, batch.own).added_up(left)
    if left is None:
        return None
    sums = np.add.reduceat(left.values.numpy(), left.firsts, dtype=np.float64)
    return torch.from_numpy(sums).float()


@_makers.makes(passes.Factors)
def factors_(
    row: Runs,
    col: Runs,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    batch: TableBatch,
) -> tuple[Flat, Flat]:
    """Advances statistics by totals -> the factors of 1 / sqrt(v), as ``Flat``s."""
    row, col = checked(row, batch, batch.row_sizes), checked(col, batch, batch.col_sizes)
    firsts = (batch.row_firsts, batch.col_firsts, batch.col_firsts)
    sizes = (batch.all_rows, batch.all_cols, batch.all_cols)
    totals = map(_totals, sums, firsts, sizes)
    columns: dict[str, Any] = dict(zip(("in", "in2", "in3"), totals, strict=False))
    by_row = Flat(batch.own.scratch(batch.all_rows), batch.row_firsts)
    by_col = Flat(batch.own.scratch(batch.all_cols), batch.col_firsts)
    columns |= {"row": row, "col": col, "out": by_row, "out2": by_col}
    batch.whole.run("factors", {**columns, "lerp": 1 - beta, "eps": eps, "clip": clip})
    return by_row, by_col


@_makers.makes(passes.UnitQuotient)
def unit_quotient(x: Any, like: Any, batch: TableBatch) -> Quotient:
    """x as a quotient whose factors are all 1."""
    row = Flat(batch.own.scratch(batch.all_rows).fill_(1), batch.row_firsts)
    col = Flat(batch.own.scratch(batch.all_cols).fill_(1), batch.col_firsts)
    return Quotient(x, cast(Tensor, row), cast(Tensor, col))


@_makers.makes(passes.NormalizeRows)
def normalize_rows(x: Any, sums: Tensor, least: Number, batch: TableBatch) -> Any:
    """x with rows of the norm √cols."""
    return replace(x, row=_normalized("normalize_rows", x.row, sums, least, batch))


@_makers.makes(passes.NormalizeColumns)
def normalize_columns(x: Any, sums: Tensor, least: Number, batch: TableBatch) -> Any:
    """x with columns of the norm √rows."""
    return replace(x, col=_normalized("normalize_columns", x.col, sums, least, batch))


def _normalized(name: str, factor: Flat, sums: Tensor, least: Number, batch: TableBatch) -> Flat:
    totals = _totals(sums, factor.firsts, len(factor.values))
    new = Flat(batch.own.scratch(len(factor.values)), factor.firsts)
    batch.whole.run(name, {"in": totals, "in2": factor, "out": new, "eps": least})
    return new


@_makers.makes(passes.NormalizeWholeRows)
def normalize_whole_rows(x: Any, least: Number, like: Any, batch: TableBatch) -> tuple[Any, Tensor]:
    """x with rows of the norm √cols, and the column sums of its new squares."""
    row, sums = _sums(batch, batch.all_rows, batch.all_cols)
    _run(
        "normalize_whole_rows",
        batch,
        _source(x),
        out=Flat(row, batch.own_row_firsts),
        out2=Flat(sums, batch.own_col_firsts),
        eps=least,
    )
    return replace(x, row=Flat(row, batch.row_firsts), scale=1.0), sums


@_makers.makes(passes.ScatteredSquares)
def scattered_squares(x: Any, like: Any, batch: TableBatch) -> Tensor:
    """Squares of runs at their place in whole parameters, 0 elsewhere -> [elements of all]."""
    _refuse("scattered_squares", batch.own)
    (out,) = _sums(batch, batch.elements)
    at = Flat(out, batch.firsts + batch.starts)
    _run("scattered_squares", batch, _source(x), out=at)
    _keep_square_parts(x, Flat(out, batch.firsts), batch)
    return out


@_makers.makes(passes.Advance1x1)
def advance_1x1_(
    row: Runs, col: Runs, squares: Tensor, eps: float, beta: float, batch: TableBatch
) -> Tensor:
    """Advances the statistics of matrices of one element -> the sums of x² / v, [n]."""
    _refuse("advance_1x1", batch.whole)
    row, col = checked(row, batch, batch.row_sizes), checked(col, batch, batch.col_sizes)
    given = _totals(squares, batch.firsts, batch.elements)
    totals = batch.own.zeros(len(batch))
    columns = {"row": row, "col": col, "in": given, "out": _each(totals)}
    batch.whole.run("advance_1x1", {**columns, "lerp": 1 - beta, "eps": eps})
    return totals


@_makers.makes(passes.OwnRun)
def own_run(v: Runs, batch: TableBatch) -> Shifted:
    """The runs' parts of vectors with a number for each element of a whole parameter."""
    return Shifted(checked(v, batch, batch.sizes), 4 * batch.starts)


@_makers.makes(passes.Lerp)
def lerp_(m: Runs, x: Any, weight: float, batch: TableBatch) -> None:
    """m ← m + weight · (x − m)."""
    _run("lerp", batch, _source(x), out=checked(m, batch, batch.run_sizes), lerp=weight)


@_makers.makes(passes.SquareLerp)
def square_lerp_(v: Runs, x: Any, eps: float, weight: float, batch: TableBatch) -> None:
    """v ← v + weight · (x² + eps − v)."""
    v = checked(v, batch, batch.run_sizes)
    _run("square_lerp", batch, _source(x), out=v, lerp=weight, eps=eps)


@_makers.makes(passes.Apply)
def apply_(p: Weights, u: Any, lr: Number, weight_decay: Number, batch: TableBatch) -> None:
    """p ← p · (1 − lr · weight_decay) − lr · u."""
    source = _source(u)
    if source.storage is not None and not _is_same(source.storage.run, p.run):
        raise Unsupported  # the pass adds the weights that it writes
    numbers: dict[str, Any] = {"lr": lr}
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0
    if decays:
        if "decay" in source.scalars:
            raise Unsupported
        numbers["decay"] = weight_decay
    if p.update_sums is not None:
        numbers["update_sums"] = p.update_sums
    if p.norm_cache is not None:
        numbers["norm_cache"] = p.norm_cache
    _run("apply", batch, source, p, decays, **numbers)


def _flat(runs: Sequence[Tensor]) -> AnyTable:
    """A table of flat tensors."""
    sizes = [(0, len(x), 1, 1, len(x)) for x in runs]
    return new_table(sizes, [0] * len(runs), runs[0].device)


def _source(x: Any) -> Source:
    """The description of an input; raises Unsupported if no table can read it."""
    source = source_of(x)
    if source is None:
        raise Unsupported
    return source


def _refuse(
    name: str, of: AnyTable, form: str = "IS_RUN", columns: Mapping[str, Any] | None = None
) -> None:
    """Raises Unsupported if a table does not make a pass, or not with a form and columns."""
    if name not in of.passes or form not in schema.READ_BY.get(name, schema.FORMS):
        raise Unsupported
    columns = columns or {}
    if "decay" in columns and name not in schema.ADD_WEIGHTS:
        raise Unsupported


def _same(a: Source, b: Source) -> bool:
    """Whether both sources read the same weights."""
    if a.storage is None or b.storage is None:
        return False
    return _is_same(a.storage.run, b.storage.run)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two runs are the same tensors."""
    return all(map(operator.is_, _runs(a).tensors, _runs(b).tensors))


def _run(
    name: str,
    batch: TableBatch,
    source: Source,
    p: Weights | None = None,
    decays: bool = False,
    **columns: Any,
) -> SquareParts | None:
    """Makes a pass that reads ``source``, and writes ``p`` if it is given."""
    filled: dict[str, Any] = {**source.scalars, **columns}
    _refuse(name, batch.own, source.form, filled)
    filled |= inputs(batch, source)
    if "row" in source.tensors:
        filled["row"] = Shifted(filled["row"], batch.row_offsets)
        filled["col"] = Shifted(filled["col"], batch.col_offsets)
    weights: Any = p or source.storage
    storage = None
    if weights is not None:
        storage = weights.how, weights.run.dtype
        filled |= weight_columns(batch, weights)
    dtype = source.tensors["x"].dtype if "x" in source.tensors else None
    is_decayed = decays or "decay" in source.scalars
    fresh = batch.is_whole and name in ("row_col_sums", "weighted_sums", "normalize_whole_rows")
    return batch.own.run(name, filled, source.form, dtype, storage, is_decayed, fresh)


def _totals(sums: Tensor, firsts: Any, n: int) -> Flat:
    """Sums over all ranks, [n]; raises Unsupported if a table cannot read them."""
    if sums.dtype != torch.float32 or sums.numel() != n:
        raise Unsupported
    return Flat(sums.contiguous(), firsts)


def _runs(x: Any) -> Any:
    """An object with ``pointers``; a tensor becomes the ``Runs`` of one parameter."""
    return Runs([x]) if isinstance(x, Tensor) else x


def _each(total: Tensor) -> Flat:
    """A vector with one number per parameter as a ``Flat``."""
    return Flat(total, np.arange(total.numel()))


def _sums(batch: TableBatch, *sizes: int) -> Sequence[Tensor]:
    """Memory for sums of these sizes: zeros, or uninitialized if the pass writes every sum."""
    is_filled, own = batch.is_whole and batch.own.overwrites_sums, batch.own
    return (own.scratch if is_filled else own.zeros)(sum(sizes)).split_with_sizes(sizes)
