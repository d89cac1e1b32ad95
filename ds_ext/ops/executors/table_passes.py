"""Passes by tables: the arguments of a pass become columns of a table, which runs the pass.

A table calls native code on a CPU and kernels on a GPU. In a batch, ``Runs`` replace the tensors of
a pass, and vectors [n] replace its numbers. A run that is stepped alone is a batch of one: its
tensors stay tensors, and results have the shapes of the reference.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar, cast

from torch import Tensor

from ds_ext.ops import block_sizes, schema, sixteen_bit
from ds_ext.ops.batch import Batch
from ds_ext.ops.executors.reference import Reference, normalized
from ds_ext.ops.executors.tables import (
    BatchTables,
    Unsupported,
    checked,
    each_of,
    inputs,
    totals_of,
    weight_columns,
)
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.expressions import (
    Gradient,
    Number,
    Quotient,
    Readable,
    Source,
    WeightStorage,
    Writable,
    read,
    source_of,
    storage_of,
)
from ds_ext.ops.functions import apply_
from ds_ext.ops.runs import Call, Columns, Runs
from ds_ext.ops.shard import Shard

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["TablePasses", P], T]
MAX_REPEATED = 8  # numbers of equal runs for which a run keeps a batch


def _or_reference(method: Method[P, T]) -> Method[P, T]:
    """Decorates a pass: the reference runs it over a lone run that no table can read or write.

    A batch has no such way: its pass raises TypeError, before it has read or written anything.
    """

    @functools.wraps(method)
    def run(self: "TablePasses", *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Unsupported:
            if self.one is not None:
                return cast(T, getattr(Reference, method.__name__)(self, *args, **kwargs))
            raise TypeError(
                f"ops.{method.__name__} cannot read its input over a batch: native code and "
                "kernels have no form for this expression, or read tensors of other dtypes. "
                "Register the rule with is_batched=False, and its parameters are stepped one by "
                "one."
            ) from None

    return cast(Method[P, T], run)


class TablePasses(BatchTables, Reference):
    """The passes over a batch, or over one run.

    If ``one`` is given, the batch replaces this run, which is stepped alone.
    """

    def __init__(self, batch: Batch, one: Shard | None = None) -> None:
        BatchTables.__init__(self, batch)
        self.one = one
        if one is not None:
            Reference.__init__(self, one, block_sizes.product_limit(batch.device))
        self.takes_matrices = one is None or devices.supports_matrices(one)
        # Two such runs are at most a block.
        self.is_small = one is not None and 2 * len(one) <= block_sizes.product_limit(batch.device)
        self._repeated: dict[int, TablePasses] = {}

    def joins(self, name: str, source: Source) -> bool:
        """Returns whether tables read ``source``, and a block contains several such runs."""
        return self.is_small and source.storage is None and self._reads(name, source)

    def repeated(self, n: int) -> "TablePasses":
        """Returns the passes over ``n`` runs with the geometry of this one."""
        found = self._repeated.get(n)
        if found is None:
            if len(self._repeated) >= MAX_REPEATED:
                self._repeated.clear()
            batch = self.batch
            found = TablePasses(Batch([*batch.shards] * n, [*batch.noise_firsts] * n, batch.device))
            self._repeated[n] = found
        return found

    @_or_reference
    def square_sums(self, runs: Sequence[Readable], like: Gradient) -> Sequence[Tensor]:
        sources = [self._source("square_sums", x) for x in runs]
        for x in sources if len(sources) > 1 else ():  # before one of them advances moments
            inputs(self.batch, x)
        totals = self.own.zeros(*[len(self.batch)] * len(runs))
        for source, total in zip(sources, totals, strict=True):
            more: Columns = {}
            if source.form == "IS_WEIGHT" and source.storage and source.storage.norm_cache:
                more = {"norm_cache": source.storage.norm_cache}
            self._run("square_sums", source, out=each_of(total), **more)
        return totals if self.one is None else [total.view(()) for total in totals]

    @_or_reference
    def row_col_square_sums(self, x: Readable, like: Gradient) -> tuple[Tensor, Tensor]:
        batch, source = self.batch, self._source("row_col_sums", x)
        row, col = self.own.zeros(batch.all_rows, batch.all_cols)
        self._run(
            "row_col_sums",
            source,
            out=Runs((row,), firsts=batch.own_row_firsts),
            out2=Runs((col,), firsts=batch.own_col_firsts),
        )
        self.keep_square_parts(x, Runs((row,), firsts=batch.row_firsts))
        return self._by_matrix(row), self._by_matrix(col)

    @_or_reference
    def weighted_square_sums(
        self, x: Readable, before: Tensor, eps: float, beta: float, like: Gradient
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, source = self.batch, self._source("weighted_sums", x)
        row_runs = checked(before, batch, batch.row_sizes)
        row, col, weighted = self.own.zeros(batch.all_rows, batch.all_cols, batch.all_cols)
        self._run(
            "weighted_sums",
            source,
            out=Runs((row,), firsts=batch.own_row_firsts),
            out2=Runs((col,), firsts=batch.own_col_firsts),
            out3=Runs((weighted,), firsts=batch.own_col_firsts),
            before=row_runs.shifted(batch.row_offsets),
            lerp=1 - beta,
            eps=eps,
        )
        self.keep_square_parts(x, Runs((row,), firsts=batch.row_firsts))
        return self._by_matrix(row), self._by_matrix(col), self._by_matrix(weighted)

    @_or_reference
    def factors_(
        self,
        row: Tensor,
        col: Tensor,
        sums: tuple[Tensor, ...],
        eps: float,
        beta: float,
        clip: float,
    ) -> tuple[Tensor, Tensor]:
        """Advances statistics by totals -> the factors of 1 / sqrt(v), of a batch as ``Runs``s."""
        batch = self.batch
        if not self.takes_matrices:
            raise Unsupported
        firsts = (batch.row_firsts, batch.col_firsts, batch.col_firsts)
        sizes = (batch.all_rows, batch.all_cols, batch.all_cols)
        totals = map(totals_of, sums, firsts, sizes)
        columns: Columns = dict(zip(("in", "in2", "in3"), totals, strict=False))
        columns["row"] = checked(row, batch, batch.row_sizes)
        columns["col"] = checked(col, batch, batch.col_sizes)
        by_row, by_col = self.own.scratch(batch.all_rows), self.own.scratch(batch.all_cols)
        columns["out"] = Runs((by_row,), firsts=batch.row_firsts)
        columns["out2"] = Runs((by_col,), firsts=batch.col_firsts)
        columns |= {"lerp": 1 - beta, "eps": eps, "clip": clip}
        self.whole.run(Call("factors", columns))
        if self.one is not None:
            return self._by_matrix(by_row).unsqueeze(-1), self._by_matrix(by_col).unsqueeze(-2)
        return cast(Tensor, columns["out"]), cast(Tensor, columns["out2"])

    @_or_reference
    def lerp_(self, m: Writable, x: Readable, weight: float) -> None:
        source = self._source("lerp", x)
        out = checked(m, self.batch, self.batch.run_sizes)
        self._run("lerp", source, out=out, lerp=weight)

    @_or_reference
    def square_lerp_(self, v: Tensor, x: Readable, eps: float, weight: float) -> None:
        source = self._source("square_lerp", x)
        out = checked(v, self.batch, self.batch.run_sizes)
        self._run("square_lerp", source, out=out, lerp=weight, eps=eps)

    @_or_reference
    def apply_(self, p: Writable, u: Readable, lr: Number, weight_decay: Number) -> None:
        stored = storage_of(p)
        if stored is None:
            raise Unsupported
        if self.one is not None and source_of(u) is None:
            return self._apply_unread(p, stored, u, lr, weight_decay)
        source = self._source("apply", u)
        if source.storage is not None and source.storage.run is not stored.run:
            raise Unsupported  # the pass adds the weights that it writes
        numbers: Columns = {"lr": lr}
        decays = isinstance(weight_decay, Tensor) or weight_decay != 0
        if decays:
            if "decay" in source.scalars:
                raise Unsupported
            numbers["decay"] = weight_decay
        if stored.norm_cache is not None:
            numbers["norm_cache"] = stored.norm_cache
        self._run("apply", source, stored, decays, **numbers)

    def _apply_unread(
        self, p: Writable, stored: WeightStorage, u: Readable, lr: Number, weight_decay: Number
    ) -> None:
        """``apply_`` for updates that no table reads, such as matrix products: slice by slice."""
        weight_columns(self.batch, stored)  # raises Unsupported before the first slice is written
        for b in cast(Shard, self.one).blocks(block_sizes.product_limit(stored.run.device)):
            values = read(u, b).reshape(-1)
            part = sixteen_bit.part(cast(sixteen_bit.Weight, p), b.run)
            flat = Shard.whole((len(values),))
            apply_(part, values, flat, lr=lr, weight_decay=weight_decay)

    @_or_reference
    def unit_quotient(self, x: Readable, like: Gradient) -> Quotient:
        batch = self.batch
        if self.one is not None:
            raise Unsupported
        row = Runs((self.own.scratch(batch.all_rows).fill_(1),), firsts=batch.row_firsts)
        col = Runs((self.own.scratch(batch.all_cols).fill_(1),), firsts=batch.col_firsts)
        return Quotient(x, cast(Tensor, row), cast(Tensor, col))

    @_or_reference
    def normalize_rows(self, x: Quotient, sums: Tensor, least: Number) -> Quotient:
        return replace(x, row=_normalized(x.row, sums, *self.batch.row_owners, least))

    @_or_reference
    def normalize_columns(self, x: Quotient, sums: Tensor, least: Number) -> Quotient:
        return replace(x, col=_normalized(x.col, sums, *self.batch.col_owners, least))

    @_or_reference
    def normalize_whole_rows(
        self, x: Quotient, least: Number, like: Gradient
    ) -> tuple[Quotient, Tensor]:
        batch, source = self.batch, self._source("weighted_sums", x)
        row, sums = self.own.zeros(batch.all_rows, batch.all_cols)
        self._run(
            "weighted_sums",
            source,
            out=Runs((row,), firsts=batch.own_row_firsts),
            out2=Runs((sums,), firsts=batch.own_col_firsts),
            eps=least,
        )
        if self.one is not None:
            return replace(x, row=self._by_matrix(row).unsqueeze(-1)), self._by_matrix(sums)
        return replace(x, row=cast(Tensor, Runs((row,), firsts=batch.row_firsts))), sums

    def _source(self, name: str, x: Readable) -> Source:
        """The description of an input of a pass; raises Unsupported if no table can read it."""
        source = source_of(x)
        if source is None or not self._reads(name, source):
            raise Unsupported
        return source

    def _reads(self, name: str, source: Source) -> bool:
        """Whether a pass can read an input."""
        if source.form not in schema.READ_BY.get(name, schema.FORMS):
            return False
        if "decay" in source.scalars and name not in schema.ADD_WEIGHTS:
            return False
        return self.takes_matrices or not (name in schema.BY_MATRIX or source.is_by_matrix)

    def _run(
        self,
        name: str,
        source: Source,
        p: WeightStorage | None = None,
        decays: bool = False,
        **columns: object,
    ) -> None:
        """Runs a pass that reads ``source``, and writes ``p`` if it is given."""
        filled: Columns = {**source.scalars, **columns, **inputs(self.batch, source, p)}
        weights = p or source.storage
        storage = None if weights is None else (weights.format, weights.run.dtype)
        dtype = source.tensors["x"].dtype if "x" in source.tensors else None
        is_decayed = decays or "decay" in source.scalars
        self.own.run(Call(name, filled, source.form, dtype, storage, is_decayed))

    def _by_matrix(self, values: Tensor) -> Tensor:
        """Numbers for all rows or columns, as rules see them: flat in a batch."""
        return values if self.one is None else values.view(self.one.mats, -1)


def _normalized(
    factor: object, sums: Tensor, owners: Tensor, norms: Tensor, least: Number
) -> Tensor:
    """Factors of all rows, or columns, of a batch, from the sums of their squares."""
    if not isinstance(factor, Runs) or sums.shape != owners.shape:  # of a run that is stepped alone
        raise Unsupported
    if isinstance(least, Tensor) and least.dim():
        least = least[owners]
    new = normalized(factor.values, sums, norms, least)
    return cast(Tensor, Runs((new,), firsts=factor.offsets // 4))


class TableBatch(Batch):
    """A batch whose passes native code or kernels run."""

    @functools.cached_property
    def passes(self) -> TablePasses:  # type: ignore[override]
        """The passes over it."""
        return TablePasses(self)
