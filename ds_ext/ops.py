"""The passes over memory that rules are made of, in plain torch: the specification of each.

A pass walks a rank's run in blocks of at most ``shard.BLOCK`` elements, so an update that is
written as if it were a tensor (``Quotient``, ``Difference``) costs one scratch block. Anything
with ``block(b)`` can be read, anything with ``write_(b, new)`` can be written; a tensor is both.
"""

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ds_ext.shard import Block, Shard


class Run(Protocol):
    """Values of one rank's run that are computed when a block of them is read."""

    def block(self, b: Block) -> Tensor: ...


class WritableRun(Run, Protocol):
    """A run that is kept in another form than a tensor of its values."""

    def write_(self, b: Block, new: Tensor) -> None: ...


Readable: TypeAlias = "Tensor | Run"
Gradient: TypeAlias = "Tensor | Scaled"  # has a dtype and a device too
Writable: TypeAlias = "Tensor | WritableRun"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and updates are computed in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def read(x: Readable, b: Block) -> Tensor:
    """Block ``b`` of a run, [mats, rows, cols], in the accumulator's dtype; may alias ``x``."""
    if isinstance(x, Tensor):
        return x[b.run].view(b.shape).to(accumulator(x.dtype))
    return x.block(b)


def write_(x, b: Block, new: Tensor) -> None:
    """Stores ``new``, [mats, rows, cols], as block ``b`` of a run."""
    if isinstance(x, Tensor):
        x[b.run].view(b.shape).copy_(new)
    else:
        x.write_(b, new)


def flat(run: slice) -> Block:
    """Elements of a run as a block of one row."""
    return Block(run, slice(0, 1), slice(0, 1), run)


@dataclass(frozen=True)
class Scaled:
    """x · factor, kept within ± ``bound``: a gradient averaged, unscaled and clipped when read."""

    x: Tensor
    factor: Tensor | float = 1.0
    bound: float | None = None

    def block(self, b: Block) -> Tensor:
        x = read(self.x, b) * self.factor
        return x if self.bound is None else x.clamp_(-self.bound, self.bound)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device


@dataclass(frozen=True)
class Extended:
    """A flat run of ``size`` elements between others, which are read and never written."""

    before: Tensor
    x: Readable
    size: int
    after: Tensor

    def block(self, b: Block) -> Tensor:
        before, own, after = self._cut(b)
        parts = (self.before[before], read(self.x, own).reshape(-1), self.after[after])
        return torch.cat(parts).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> None:
        before, own, _ = self._cut(b)
        first = before.stop - before.start
        write_(self.x, own, new.reshape(-1)[first : first + own.shape[2]].view(own.shape))

    def _cut(self, b: Block) -> tuple[slice, Block, slice]:
        """The elements of a block that lie before, in and after the run."""
        cuts, start = [], 0
        for size in (len(self.before), self.size, len(self.after)):
            low, high = (min(max(at - start, 0), size) for at in (b.run.start, b.run.stop))
            cuts.append(slice(low, high))
            start += size
        return cuts[0], flat(cuts[1]), cuts[2]


@dataclass(frozen=True)
class Quotient:
    """x · row · col · scale: an update by a second moment whose factors are inverse roots.

    ``row`` is [mats, rows] and ``col`` [mats, cols]; for a parameter that is no matrix ``row`` is
    None and ``col`` is a run like ``x``.
    """

    x: Readable
    row: Tensor | None
    col: Tensor
    scale: Tensor | float = 1.0

    def block(self, b: Block) -> Tensor:
        x = read(self.x, b)
        if self.row is None:
            return x * self.col[b.run].view(b.shape) * self.scale
        row = self.row[b.mats, b.rows] * self.scale
        return (x * row.unsqueeze(-1)).mul_(self.col[b.mats, b.cols].unsqueeze(-2))

    def times(self, factor: Tensor | float) -> "Quotient":
        return replace(self, scale=self.scale * factor)


@dataclass(frozen=True)
class Difference:
    """a − b."""

    a: Readable
    b: Readable

    def block(self, b: Block) -> Tensor:
        return read(self.a, b) - read(self.b, b)


@dataclass(frozen=True)
class Sum:
    """x + weight · y."""

    x: Readable
    y: Readable
    weight: float

    def block(self, b: Block) -> Tensor:
        return read(self.x, b).add(read(self.y, b), alpha=self.weight)


@dataclass(frozen=True)
class RootQuotient:
    """c1 · m / (sqrt(c2 · v) + eps): Adam's update, ``c1`` and ``c2`` correcting the bias."""

    m: Readable
    v: Readable
    c1: float
    c2: float
    eps: float

    def block(self, b: Block) -> Tensor:
        divisor = (read(self.v, b) * self.c2).sqrt_().add_(self.eps)
        return (read(self.m, b) * self.c1).div_(divisor)


@dataclass(frozen=True)
class AdamStep:
    """m / (sqrt(v) + eps), the moments advanced by ``g`` as a block is read: read each once.

    Where the moments are kept in 8 bits, the update is made before they are rounded: a v rounded
    to 0 would divide by eps alone.
    """

    m: Writable
    v: Writable
    g: Gradient
    beta1: float
    beta2: float
    eps: float

    def block(self, b: Block) -> Tensor:
        g = read(self.g, b)
        m = read(self.m, b).to(g.dtype).lerp(g, 1 - self.beta1)
        v = read(self.v, b).to(g.dtype).lerp(g.square(), 1 - self.beta2)
        write_(self.m, b, m)
        write_(self.v, b, v)
        return m.div_(v.sqrt_().add_(self.eps))


def square_sum(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Sum of the squares of a run -> []. ``like`` gives device and dtype where the run is empty."""
    total = torch.zeros((), dtype=accumulator(like.dtype), device=like.device)
    for b in shard.blocks():
        v = read(x, b).reshape(-1)
        total += torch.dot(v, v)
    return total


def count_beyond(x: Readable, bound: float, shard: Shard, like: Gradient) -> Tensor:
    """How many elements of a run lie outside ± ``bound`` -> []."""
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for b in shard.blocks():
        total += (read(x, b).abs() > bound).sum()
    return total


def matrix_square_sums(x: Readable, shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Sums of the squares of a run over each row and column -> [mats, rows], [mats, cols].

    Rows and columns outside the run are 0, so that summing over ranks gives the whole matrix's.
    """
    dtype = accumulator(like.dtype)
    row = torch.zeros(shard.mats, shard.rows, dtype=dtype, device=like.device)
    col = torch.zeros(shard.mats, shard.cols, dtype=dtype, device=like.device)
    for b in shard.blocks():
        square = read(x, b).square()
        row[b.mats, b.rows] += square.sum(-1)
        col[b.mats, b.cols] += square.sum(-2)
    return row, col


def lerp_(m: Tensor, x: Readable, weight: float, shard: Shard) -> None:
    """m ← m + weight · (x − m), for a run."""
    for b in shard.blocks():
        m[b.run].view(b.shape).lerp_(read(x, b), weight)


def square_lerp_(v: Tensor, x: Readable, eps: float, weight: float, shard: Shard) -> None:
    """v ← v + weight · (x² + eps − v), for a run."""
    for b in shard.blocks():
        v[b.run].view(b.shape).lerp_(read(x, b).square().add_(eps), weight)


def apply_(p, u: Readable, lr: Tensor | float, decay: Tensor | float, shard: Shard) -> None:
    """p ← p − (decay · p + lr · u), for a run of weights.

    The change is added up before it meets p: 1 − decay would round alike at every step.
    """
    for b in shard.blocks():
        old = read(p, b)
        write_(p, b, old - (read(u, b) * lr).add_(old * decay))


def evaluate(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """The values of a run, [len(shard)], as a tensor: for what is small beside the parameter."""
    values = torch.empty(len(shard), dtype=accumulator(like.dtype), device=like.device)
    for b in shard.blocks():
        write_(values, b, read(x, b))
    return values


def pad(x: Tensor, part: slice, like: Gradient) -> Tensor:
    """Zeros shaped as ``like`` with ``x`` as the elements ``part``, counted flat."""
    whole = torch.zeros_like(like)
    whole.view(-1)[part] = x
    return whole
