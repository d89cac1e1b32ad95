"""Updates as lazy expressions: a pass evaluates them block by block, so no temporary is stored.

An object with ``block(b)`` can be read, an object with ``write_(b, new)`` can be written, and a
tensor can be both. The caller may overwrite the result of ``block``. The expressions in ``moments``
advance moments when they are read. ``source()`` describes an expression to native code and kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.runs import ReadByPasses, Runs
from ds_ext.ops.schema import FORMS
from ds_ext.ops.shard import Block

Number: TypeAlias = Tensor | float  # a tensor [] is read on the device when the kernel runs
# What a step yields and receives: fp32 (fp64 for fp64 parameters), of any shapes.
Sums: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class WeightStorage(ReadByPasses):
    """A weight that native code and kernels can read and write, or the weights of a batch.

    In a batch, ``Runs`` replace tensors, and ``key`` is a vector [n].
    """

    run: Tensor | Runs
    format: str = "PLAIN"  # one of schema.STORAGE: see sixteen_bit.py
    aux: Tensor | Runs | None = None
    key: int | NDArray[np.int64] = 0
    start: int | None = None  # first element of the run in its parameter; None: its shard's start
    norm_cache: object = None  # the executor's cached norms of the weights of a batch

    def storage(self) -> "WeightStorage":
        """Returns itself: the weights of a batch are only read and written by passes."""
        return self


@dataclass(frozen=True)
class Source:
    """The description of a pass's input: a form of ``schema.FORMS``, and its columns."""

    form: str
    tensors: Mapping[str, Tensor | Runs] = field(default_factory=dict)
    scalars: Mapping[str, Number] = field(default_factory=dict)
    # The weights to read. They are the input of IS_WEIGHT; with other forms, passes add ``decay``
    # times the weights to the input.
    storage: WeightStorage | None = None

    def plus(self, form: str, tensors: Mapping[str, Tensor | Runs], **scalars: Number) -> "Source":
        """Returns the same input in another form, with more columns."""
        tensors, numbers = {**self.tensors, **tensors}, {**self.scalars, **scalars}
        return Source(form, tensors, numbers, self.storage)

    @property
    def is_by_matrix(self) -> bool:
        """Whether a value depends on the row and column of its element."""
        return FORMS[self.form].is_by_matrix


def source_of(x: object) -> Source | None:
    """Returns the description of a run for native code and kernels; None if they cannot read it."""
    if isinstance(x, Tensor | Runs):
        return Source("IS_RUN", {"x": x})
    if isinstance(x, Source):
        return x
    of: Any = x
    kind = type(x)  # of the class, because instances explain what they lack
    if hasattr(kind, "storage"):
        return Source("IS_WEIGHT", storage=of.storage())
    return of.source() if hasattr(kind, "source") else None


def inner_source_of(x: object, *forms: str) -> Source | None:
    """Returns the source of what an expression contains, or None if it cannot contain that.

    Passes add weights last, so only the outermost expression may add some. An expression supports
    inputs of some ``forms``.
    """
    source = source_of(x)
    is_supported = source is not None and source.form in forms and source.storage is None
    return source if is_supported else None


def storage_of(p: object) -> WeightStorage | None:
    """Returns the description of a weight for native code and kernels, or None if unsupported."""
    if isinstance(p, Tensor):
        return WeightStorage(p)
    return p.storage() if hasattr(p, "storage") else None


class Run(Protocol):
    """Values of one rank's run that are computed block by block when they are read."""

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which the caller may overwrite."""
        ...


class WritableRun(Run, Protocol):
    """A run that is stored in another form than a tensor of its values."""

    def write_(self, b: Block, new: Tensor) -> object:
        """Stores ``new``, [mats, rows, cols], as a block; may overwrite ``new``."""
        ...


Readable: TypeAlias = Tensor | Run
Writable: TypeAlias = Tensor | WritableRun


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and updates: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def part(x: Tensor, b: Block) -> Tensor:
    """A view of block ``b`` of a flat run, [mats, rows, cols]."""
    return x[b.run].view(b.shape)


def read(x: Readable, b: Block) -> Tensor:
    """Block ``b`` of a run, [mats, rows, cols], in the accumulator's dtype.

    The result is a view of ``x`` if x is a tensor of that dtype: a rule must not write to it.
    Passes overwrite it if it is none (``is_part``).

    Example: ``signs = [ops.read(g, b).sign() for b in ops.blocks(shard, g)]``
    """
    if not isinstance(x, Tensor):
        return x.block(b)
    return part(x, b).to(accumulator(x.dtype))


def is_part(values: Tensor, x: object) -> bool:
    """Whether ``values``, read from ``x``, are a view of x."""
    return isinstance(x, Tensor) and x.dtype == values.dtype


def write_(x: Writable, b: Block, new: Tensor) -> None:
    """Stores ``new``, [mats, rows, cols], as block ``b`` of a run; may overwrite ``new``."""
    if isinstance(x, Tensor):
        part(x, b).copy_(new)
    else:
        x.write_(b, new)


def flat(run: slice) -> Block:
    """Elements of a run as a block of one row."""
    return Block(run, slice(0, 1), slice(0, 1), run)


@dataclass(frozen=True)
class Scaled(ReadByPasses):
    """x · factor clamped to ± ``bound``: a gradient averaged, unscaled and clipped when read."""

    x: Readable
    factor: Tensor | float = 1.0
    bound: float | None = None

    def block(self, b: Block) -> Tensor:
        x = read(self.x, b) * self.factor
        return x if self.bound is None else x.clamp_(-self.bound, self.bound)

    def source(self) -> Source | None:
        x = inner_source_of(self.x, *FORMS)
        if x is None:
            return None
        if isinstance(self.factor, float) and self.factor == 1 and self.bound is None:
            return x
        if x.form != "IS_RUN":  # scale multiplies a residual before m is subtracted
            has_scale = self.bound is None and x.form != "IS_RESIDUAL" and "scale" not in x.scalars
            return x.plus(x.form, {}, scale=self.factor) if has_scale else None
        if {"factor", "bound"} & x.scalars.keys():
            return None
        bound = {} if self.bound is None else {"bound": self.bound}
        return x.plus(x.form, {}, factor=self.factor, **bound)

    @property
    def dtype(self) -> torch.dtype:
        return cast(Tensor, self.x).dtype

    @property
    def device(self) -> torch.device:
        return cast(Tensor, self.x).device

    def numel(self) -> int:
        return cast(Tensor, self.x).numel()


Gradient: TypeAlias = Tensor | Scaled  # has a dtype and a device too


@dataclass(frozen=True)
class PaddedToGroups:
    """A flat run of ``size`` elements between elements that are read and never written."""

    before: Tensor
    x: Readable  # Writable, if it is written
    size: int
    after: Tensor

    def block(self, b: Block) -> Tensor:
        before, own, after = self._cut(b)
        parts = (self.before[before], read(self.x, own).reshape(-1), self.after[after])
        return torch.cat(parts).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> None:
        before, own, _ = self._cut(b)
        first = before.stop - before.start
        values = new.reshape(-1)[first : first + own.shape[2]]
        write_(cast(Writable, self.x), own, values.view(own.shape))

    def _cut(self, b: Block) -> tuple[slice, Block, slice]:
        """The elements of a block before the run, in it and after it."""
        cuts, start = [], 0
        for size in (len(self.before), self.size, len(self.after)):
            low, high = (min(max(at - start, 0), size) for at in (b.run.start, b.run.stop))
            cuts.append(slice(low, high))
            start += size
        return cuts[0], flat(cuts[1]), cuts[2]


@dataclass(frozen=True)
class Quotient:
    """x · row · col: an update by a second moment whose factors are inverse roots.

    ``row`` is [mats, rows, 1] and ``col`` [mats, 1, cols].
    """

    x: Readable
    row: Tensor
    col: Tensor

    def block(self, b: Block) -> Tensor:
        return (read(self.x, b) * self.col[b.mats, :, b.cols]).mul_(self.row[b.mats, b.rows])

    def source(self) -> Source | None:
        x = inner_source_of(self.x, "IS_RUN")
        if x is None:
            return None
        factors = {"row": self.row.contiguous(), "col": self.col.contiguous()}
        return x.plus("IS_QUOTIENT", factors)


@dataclass(frozen=True)
class RunQuotient:
    """x / sqrt(v): an update by a second moment of the shape of ``x``; 0 where v is 0.

    Example: ``ops.apply_(p, ops.RunQuotient(g, s["v"]), shard, lr=0.01)``
    """

    x: Readable
    v: Tensor

    def block(self, b: Block) -> Tensor:
        v = part(self.v, b)
        inverse = v.rsqrt().masked_fill_(v == 0, 0)
        return inverse.mul_(read(self.x, b))

    def source(self) -> Source | None:
        x = inner_source_of(self.x, "IS_RUN")
        return x and x.plus("IS_VECTOR", {"v": self.v})


@dataclass(frozen=True)
class Sum:
    """x + weight · y."""

    x: Readable
    y: Readable
    weight: float

    def block(self, b: Block) -> Tensor:
        return (read(self.y, b) * self.weight).add_(read(self.x, b))

    def source(self) -> Source | None:
        x, storage = source_of(self.x), storage_of(self.y)
        if x is None or storage is None or x.storage is not None:
            return None
        return replace(x.plus(x.form, {}, decay=self.weight), storage=storage)


def plus(x: Readable, y: Readable, weight: float) -> Readable:
    """x + weight · y; with a weight of 0, y is not read.

    Example: ``ops.apply_(p, ops.plus(g, s["m"], 0.9), shard, lr=0.01)``
    """
    return Sum(x, y, weight) if weight else x


def times(x: Readable, factor: Tensor | float) -> Readable:
    """x · factor.

    Example: ``ops.apply_(p, ops.times(g, 0.5), shard, lr=0.01)``
    """
    if isinstance(factor, int | float) and factor == 1:
        return x
    if isinstance(x, Scaled) and x.bound is None:
        return Scaled(x.x, factor * x.factor)
    return Scaled(x, factor)


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root of ``x``; torch's is inexact on some CPUs."""
    if x.device.type != "cpu":
        return x.sqrt()
    out = torch.empty_like(x)
    np.sqrt(x.numpy(), out=out.numpy())
    return out
