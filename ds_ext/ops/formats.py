"""Storage formats of moments: fp32, or fewer bits in groups that share a scale.

Groups count from the first element of the whole parameter. If a cut between ranks goes through a
group, both ranks keep the group, so that values are rounded alike on any number of ranks.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import functions
from ds_ext.ops.batch import Batch
from ds_ext.ops.expressions import (
    Gradient,
    PaddedToGroups,
    Readable,
    Sums,
    Writable,
    accumulator,
    flat,
    read,
)
from ds_ext.ops.moments import advance_
from ds_ext.ops.shard import Block, Shard, groups_of, outward
from ds_ext.ops.state import Part, Parts

Edges: TypeAlias = Generator[Sums, Sums, tuple[Tensor, Tensor]]
# A weight, its gradient, and the geometry of both.
Completed: TypeAlias = Generator[Sums, Sums, tuple[Writable, Readable, Shard]]


@dataclass(frozen=True)
class Format:
    """A storage format of a run of numbers.

    Attributes:
        opened: returns the values of a state, to be read and written. If native code and kernels
            can read them, they are a tensor, or have ``columns(name)``: the tensors that store the
            moment ``name``, by their table columns.
        size: the number of elements of a group, which are read and written together; 1: the state
            is the numbers themselves, in the accumulator's dtype.
        code: the dtype of an element in a group.
        scale: the dtype of a group's scale.
        key: of the scales in the state.
    """

    opened: Callable[[Any], Writable]
    size: int
    code: torch.dtype | None = None
    scale: torch.dtype | None = None
    key: str = "scale"

    def state_spec(self, run: slice, total: int) -> Part | Parts:
        """Returns the state of the values ``run`` of ``total``; the run has whole groups."""
        if self.size == 1:
            return Part.of(run, total)
        groups = Part.of(groups_of(run, self.size), -(-total // self.size), self.scale)
        return {"code": Part.of(run, total, self.code), self.key: groups}


PLAIN = Format(lambda kept: kept, 1)


def splits_groups(shard: Shard | Batch, size: int) -> bool:
    """Whether a cut between ranks goes through a group of ``size``; the same on all ranks."""
    return bool(np.remainder(shard.starts, size).any())


def state_spec(format_: Format, shard: Shard) -> Part | Parts:
    """The state of one number per element of a parameter's run, extended to whole groups."""
    total = shard.numel
    return format_.state_spec(outward(shard.start, shard.stop, format_.size, total), total)


def whole_groups(p: Writable, g: Gradient, shard: Shard, size: int) -> Completed:
    """Extends a run of a weight and of its gradient to whole groups; their geometry is a vector's.

    If cuts go through groups of ``size`` elements, one round exchanges the gradients of these
    groups. The weights of other ranks are neither read nor written: the extended weight reads
    gradients there, and these results are discarded.
    """
    if not splits_groups(shard, size):
        return p, g, shard.flat
    before, after = yield from _others(g, shard, size)
    n = len(shard)
    whole = Shard.whole((len(before) + n + len(after),))
    return (PaddedToGroups(before, p, n, after), PaddedToGroups(before, g, n, after), whole)


def _others(g: Gradient, shard: Shard, size: int) -> Edges:
    """Other ranks' elements of the first and last group, before and after the run, in one round."""
    shared = sorted({at // size for at in shard.starts if at % size})
    dtype = accumulator(g.dtype)
    before = after = torch.zeros(0, dtype=dtype, device=g.device)
    edges = torch.zeros(len(shared), size, dtype=dtype, device=g.device)
    ends = {shard.start // size, (shard.stop - 1) // size} & set(shared) if len(shard) else set()
    for group in ends:
        start, stop = max(group * size, shard.start), min((group + 1) * size, shard.stop)
        own = flat(slice(start - shard.start, stop - shard.start))
        row = edges[shared.index(group)]
        row[start - group * size : stop - group * size] = read(g, own).reshape(-1)
    (edges,) = yield (edges,)
    run = outward(shard.start, shard.stop, size, shard.numel)
    if run.start < shard.start:
        before = edges[shared.index(run.start // size), : shard.start - run.start]
    if shard.stop < run.stop:
        last = (shard.stop - 1) // size
        after = edges[shared.index(last), shard.stop - last * size : run.stop - last * size]
    return before, after


def lerp_(
    format_: Format, kept: Any, x: Readable, weight: float, shard: Any, like: Gradient
) -> Generator[Sums, Sums, Readable]:
    """m ← m + weight · (x − m), for a moment m of a run; returns m as it is stored.

    If cuts go through groups, one round exchanges the elements of ``x`` in these groups.

    Args:
        format_: the storage format of m.
        kept: the state of m, by ``state_spec``.
        x: the run. It may depend on rows and columns.
        weight: of x in m.
        shard: the geometry; a batch only if groups have one element.
        like: a gradient.
    """
    m = format_.opened(kept)
    if format_.size == 1:
        functions.lerp_(m, x, weight, shard)
        return m
    dtype = accumulator(like.dtype)
    by_element: Any = _ByElement(x, shard, dtype, like.device)
    _, padded, whole = yield from whole_groups(by_element, by_element, shard, format_.size)
    for b in functions.blocks(whole, like):
        advance_(m, b, read(padded, b), weight)
    first = outward(shard.start, shard.stop, format_.size, shard.numel).start
    return _OwnValues(m, shard.start - first, len(whole), format_.size, dtype)


@dataclass(frozen=True)
class _ByElement:
    """A run of a matrix, to be read in flat blocks, which need not be boxes of the matrix."""

    x: Readable
    shard: Shard
    dtype: torch.dtype
    device: torch.device

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [1, 1, elements]. The caller may overwrite them."""
        start, first = b.run.start, self.shard.start
        part = replace(self.shard, start=first + start, stop=first + b.run.stop)
        values = torch.empty(len(part), dtype=self.dtype, device=self.device)
        for box in part.blocks(len(part)):  # a block's memory, as boxes as large as they can be
            run = slice(start + box.run.start, start + box.run.stop)
            values[box.run] = read(self.x, replace(box, run=run)).reshape(-1)
        return values.view(b.shape)


@dataclass(frozen=True)
class _OwnValues:
    """A run's values of a moment, from element ``before`` of its ``total`` elements on."""

    m: Writable
    before: int
    total: int
    size: int  # of a group, which is read as a whole
    dtype: torch.dtype

    def block(self, b: Block) -> Tensor:
        start, stop = self.before + b.run.start, self.before + b.run.stop
        groups = outward(start, stop, self.size, self.total)
        values = read(self.m, flat(groups)).view(-1)[start - groups.start : stop - groups.start]
        return values.to(self.dtype).view(b.shape)
