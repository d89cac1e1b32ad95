"""Joint operations: what the generators of many matrices compute together, as one.

A rule steps one matrix. Where it would run many small operations, such as the products of an
iteration, it yields a ``Joint``. Whoever advances many generators stacks the tensors of those that
yield the same operation for tensors of the same shapes, and runs the operation once. This costs the
host about as much as for one matrix. No rank sends anything.

A pass over the run of a matrix is such an operation too, without stacks: ``JointPass``. A rule runs
it by ``yield from`` a function of this file.
"""

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import block_sizes, functions
from ds_ext.ops.expressions import (
    Gradient,
    Number,
    Readable,
    Scaled,
    Source,
    Sums,
    WeightStorage,
    Writable,
    accumulator,
    source_of,
    storage_of,
    times,
)
from ds_ext.ops.products import MakeProduct, Product, product, summed_products
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard

Operation = Callable[..., Sums]
Results = list[Sums]
TablePasses: TypeAlias = Any  # of executors.table_passes, which rules do not import
FEW = 8  # for fewer gradients in a stack, copying them takes as long as separate products


class Joint(tuple[Tensor, ...]):
    """Tensors that a generator yields, to receive the results of an operation on them.

    Args:
        operation: a function of stacks of the tensors, [n, ...] each, which returns stacks. Result
            i depends on the tensors i alone. Operations are the same if they compare equal.
        tensors: of one matrix.
        results: the elements of results that count as those of the tensors do.
    """

    operation: Operation
    results: int

    def __new__(cls, operation: Operation, *tensors: Tensor, results: int = 0) -> "Joint":
        """Keeps the operation beside the tensors."""
        made = super().__new__(cls, tensors)
        made.operation, made.results = operation, results
        return made

    @property
    def key(self) -> Hashable:
        """What joints have in common that are answered together."""
        return self.operation, tuple([(x.shape, x.dtype, x.device) for x in self])

    @property
    def most(self) -> int:
        """How many are answered together at most, so that their stacks are as large as a block."""
        limit = block_sizes.product_limit(self[0].device)
        return max(1, limit // max(1, sum(x.numel() for x in self) + self.results))

    def answers(self, joints: Sequence["Joint"]) -> Results:
        """Returns the results of joints with the key of this one, in their order."""
        if len(joints) == 1:
            return [tuple(x[0] for x in self.operation(*(x.unsqueeze(0) for x in self)))]
        stacks = [torch.stack(tensors) for tensors in zip(*joints, strict=True)]
        return list(zip(*(x.unbind() for x in self.operation(*stacks)), strict=True))


class JointPass(Joint):
    """A pass over the run of a matrix, which runs once over the equal runs of a bucket.

    Its tensors are those of its input, where they lie.

    Attributes:
        passes: the passes over the run.
        source: the input.
        stored: the weights that the pass writes; None: it returns tensors.
        numbers: further arguments of the pass.
    """

    passes: TablePasses
    source: Source
    stored: WeightStorage | None
    numbers: tuple[Number, ...]

    @property
    def key(self) -> Hashable:
        """What passes have in common that run together."""
        source, w = self.source, self.stored
        read = source.form, self[0].dtype, *source.scalars.items()
        written = w and (w.format, w.run.dtype)
        return self.operation, self.passes, read, written, self.numbers

    def answers(self, joints: Sequence["JointPass"]) -> Results:  # type: ignore[override]
        """Returns the results of passes with the key of this one, in their order."""
        n, source = len(joints), self.source
        tensors = {
            name: Runs([cast(Tensor, x.source.tensors[name]) for x in joints])
            for name in source.tensors
        }
        read = Source(source.form, tensors, {k: _of_each(x, n) for k, x in source.scalars.items()})
        numbers = [_of_each(x, n) for x in self.numbers]
        stored = [x.stored for x in joints if x.stored is not None]
        written = _joined(stored) if stored else None
        results = self.operation(self.passes.repeated(n), read, self[0], written, *numbers)
        return list(zip(*(x.view(n, -1).unbind() for x in results), strict=True)) or [()] * n


def _of_each(x: Number, n: int) -> Number:
    """A number for each of n runs."""
    return x.repeat(n) if isinstance(x, Tensor) else x


def _joined(weights: Sequence[WeightStorage]) -> WeightStorage:
    """The weights of several runs as those of a batch."""
    aux = None if weights[0].aux is None else Runs([cast(Tensor, w.aux) for w in weights])
    keys = np.array([w.key for w in weights], dtype=np.int64)
    runs = Runs([cast(Tensor, w.run) for w in weights])
    return WeightStorage(runs, weights[0].format, aux, keys)


def _asked(
    operation: Operation,
    name: str,
    x: Readable,
    passes: TablePasses,
    stored: WeightStorage | None = None,
    numbers: tuple[Number, ...] = (),
) -> JointPass | None:
    """The request for a pass; None if it should run at once, or a batch has no such pass.

    ``operation`` gets the passes over all runs, the input, a tensor of its dtype, the weights that
    the pass writes, and the numbers.
    """
    source = source_of(x)
    if source is None or not passes.joins(name, source):
        return None
    made = JointPass(operation, *cast(Sums, (*source.tensors.values(),)))
    made.passes, made.source, made.stored, made.numbers = passes, source, stored, numbers
    return made


def row_col_square_sums(
    x: Readable, shard: Shard, like: Gradient
) -> Generator[Sums, Sums, tuple[Tensor, Tensor]]:
    """``ops.row_col_square_sums`` of a matrix, flat: [rows], [cols]."""
    passes = functions.passes_over(shard, like)
    asked = _asked(_row_col_square_sums, "row_col_sums", x, passes)
    if asked is None:
        row, col = functions.row_col_square_sums(x, shard, like)
        return row.view(-1), col.view(-1)
    row, col = yield asked
    return row, col


def _row_col_square_sums(passes: TablePasses, x: Readable, like: Tensor, _: None) -> Sums:
    return cast(Sums, passes.row_col_square_sums(x, like))


def evaluate(x: Readable, shard: Shard, like: Gradient) -> Generator[Sums, Sums, Tensor]:
    """``ops.evaluate``: returns the values of a run, [len(shard)]."""
    passes = functions.passes_over(shard, like)
    asked = _asked(_evaluate, "lerp", x, passes)
    if asked is None:
        return functions.evaluate(x, shard, like)
    (values,) = yield asked
    return values


def _evaluate(passes: TablePasses, x: Readable, like: Tensor, _: object) -> Sums:
    n, size = len(passes.batch), passes.batch.run_sizes[0]
    values = torch.zeros(n * size, dtype=accumulator(like.dtype), device=like.device)
    passes.lerp_(Runs((values,), firsts=np.arange(n) * size), x, 1.0)
    return (values,)


def momentum(
    m: Tensor, g: Gradient, shard: Shard, beta: float, nesterov: bool
) -> Generator[Sums, Sums, Tensor | None]:
    """m ← m + (1 − beta) · (g − m); returns g + beta · (m − g), or a copy of m without Nesterov.

    It returns None, and changes nothing, if the pass should not wait for equal runs.
    """
    passes = functions.passes_writing(shard, m)
    asked = _asked(_momentum, "lerp", g, passes, storage_of(m), (beta, nesterov))
    if asked is None:
        return None
    (x,) = yield asked
    return x


def _momentum(
    passes: TablePasses, g: Readable, like: Tensor, m: WeightStorage, beta: float, nesterov: bool
) -> Sums:
    runs = cast(Runs, m.run)
    passes.lerp_(runs, g, 1 - beta)
    now = torch.cat([*runs.tensors])
    return (_evaluate(passes, g, like, m)[0].lerp_(now, beta) if nesterov else now,)


def apply_(
    p: Writable, u: Readable, shard: Shard, *, lr: Number, weight_decay: Number = 0.0
) -> Generator[Sums, Sums, None]:
    """``ops.apply_``: p ← p · (1 − lr · weight_decay) − lr · u, for a run of weights."""
    stored = storage_of(p)
    if stored is not None and stored.norm_cache is None:
        u = yield from _multiplied(u, shard)
        passes, numbers = functions.passes_writing(shard, p), (lr, weight_decay)
        asked = _asked(_apply_, "apply", u, passes, stored, numbers)
        if asked is not None:
            yield asked
            return
    functions.apply_(p, u, shard, lr=lr, weight_decay=weight_decay)


def _apply_(
    passes: TablePasses, u: Readable, like: Tensor, p: WeightStorage, lr: Number, decay: Number
) -> Sums:
    passes.apply_(p, u, lr, decay)
    return ()


@dataclass(frozen=True)
class _Products:
    """The joint operation of matrix products whose operands have ``terms`` bf16 terms."""

    terms: int

    def __call__(self, left: Tensor, right: Tensor) -> Sums:
        """Returns the products of stacks."""
        return (product(left, right, self.terms),)


def _multiplied(u: Readable, shard: Shard) -> Generator[Sums, Sums, Readable]:
    """An update with the values of its matrix product, if this is worth waiting for others."""
    x, factor = (u.x, u.factor) if isinstance(u, Scaled) else (u, 1.0)
    if not isinstance(x, Product) or shard.split is not None or not x.covers(shard):
        return u
    if 2 * len(shard) > block_sizes.product_limit(x.left.device):
        return u
    results = len(x.left) * x.right.shape[1]
    (values,) = yield Joint(_Products(x.terms), x.left, x.right, results=results)
    first = shard.start - x.first * shard.cols
    return times(values.reshape(-1)[first : first + len(shard)], factor)


@dataclass(frozen=True)
class _Summed:
    """The joint operation of ``summed``; tensors of factors follow the operands."""

    shard: Shard
    shape: tuple[int, int]
    of: MakeProduct
    terms: int
    factor: float
    bound: float | None

    def __call__(self, x: Tensor, q: Tensor, *factors: Tensor) -> Sums:
        """Returns the sums of stacks."""
        factor = factors[0] if factors else self.factor
        g = Scaled(x, factor, self.bound)
        return (summed_products(g, q, self.shard, self.shape, self.of, self.terms),)


def summed(
    g: Gradient, q: Tensor, shard: Shard, shape: tuple[int, int], of: MakeProduct, terms: int
) -> Generator[Sums, Sums, Tensor]:
    """``summed_products`` of one matrix: returns a sum of products, of the given shape."""
    g = g if isinstance(g, Scaled) else Scaled(g)
    factors = (g.factor,) if isinstance(g.factor, Tensor) else ()
    factor = 1.0 if isinstance(g.factor, Tensor) else g.factor
    operation = _Summed(shard.turnless, shape, of, terms, factor, g.bound)
    asked = Joint(operation, cast(Tensor, g.x), q, *factors, results=math.prod(shape))
    if asked.most < FEW:
        return asked.answers([asked])[0][0]
    (total,) = yield asked
    return total
