"""The passes over memory that rules are made of, in plain torch: the specification of each.

A pass walks a rank's run in blocks of at most ``shard.BLOCK`` elements, so an update that is
written as if it were a tensor (``Quotient``, ``AdamStep``) costs some blocks of scratch memory.
Anything with ``block(b)`` can be read, anything with ``write_(b, new)`` can be written; a tensor
is both. What ``block`` returns is the caller's to overwrite.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from ds_ext.ops import scratch, small
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.triton import launches
from ds_ext.ops.triton.launches import Source, kept_of, source_of

__all__ = [
    "AdamStep",
    "Extended",
    "Gradient",
    "Quotient",
    "Readable",
    "Residual",
    "RootQuotient",
    "Run",
    "RunQuotient",
    "Scaled",
    "Sum",
    "Writable",
    "WritableRun",
    "accumulator",
    "advance_",
    "advance_numbers_",
    "apply_",
    "count_beyond",
    "evaluate",
    "factors_",
    "flat",
    "is_part",
    "lerp_",
    "matrix_square_sums",
    "pad",
    "part",
    "read",
    "room",
    "square_lerp_",
    "square_sum",
    "square_sums",
    "squared",
    "squares",
    "times",
    "weighed_square_sums",
    "write_",
]


class Run(Protocol):
    """Values of one rank's run that are computed when a block of them is read."""

    def block(self, b: Block) -> Tensor: ...


class WritableRun(Run, Protocol):
    """A run that is kept in another form than a tensor of its values."""

    def write_(self, b: Block, new: Tensor) -> object: ...


Readable: TypeAlias = "Tensor | Run"
Gradient: TypeAlias = "Tensor | Scaled"  # has a dtype and a device too
Writable: TypeAlias = "Tensor | WritableRun"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and updates are computed in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def part(x: Tensor, b: Block) -> Tensor:
    """Block ``b`` of a flat run, [mats, rows, cols], in place."""
    return x[b.run].view(b.shape)


def read(x: Readable, b: Block) -> Tensor:
    """Block ``b`` of a run, [mats, rows, cols], in the accumulator's dtype.

    It is a part of ``x`` itself where x is a tensor of that dtype, else the caller's.
    """
    if not isinstance(x, Tensor):
        return x.block(b)
    values, dtype = part(x, b), accumulator(x.dtype)
    if values.dtype == dtype:
        return values
    return scratch.empty(b.shape, dtype, x.device).copy_(values)


def is_part(values: Tensor, x: object) -> bool:
    """Whether what was read from ``x`` is a part of it, and writing to one writes to the other."""
    return isinstance(x, Tensor) and x.dtype == values.dtype


def room(values: Tensor, x: Readable) -> Tensor:
    """Where to write what is made of ``values``, read from ``x``: over them if x stays as it is."""
    return scratch.like(values) if is_part(values, x) else values


def write_(x: Writable, b: Block, new: Tensor) -> None:
    """Stores ``new``, [mats, rows, cols], as block ``b`` of a run; it may be overwritten."""
    if isinstance(x, Tensor):
        part(x, b).copy_(new)
    else:
        x.write_(b, new)


def flat(run: slice) -> Block:
    """Elements of a run as a block of one row."""
    return Block(run, slice(0, 1), slice(0, 1), run)


@dataclass(frozen=True)
class Scaled:
    """x · factor, kept within ± ``bound``: a gradient averaged, unscaled and clipped when read."""

    x: Readable
    factor: Tensor | float = 1.0
    bound: float | None = None

    def block(self, b: Block) -> Tensor:
        x = read(self.x, b)
        x = torch.mul(x, self.factor, out=room(x, self.x))
        return x if self.bound is None else x.clamp_(-self.bound, self.bound)

    def source(self) -> Source | None:
        x = source_of(self.x)
        if x is None or {"factor", "bound", "scale"} & x.numbers.keys():
            return None
        if x.form != "IS_RUN":
            return None if self.bound else x.plus(x.form, {}, scale=self.factor)
        bound = {} if self.bound is None else {"bound": self.bound}
        return x.plus(x.form, {}, factor=self.factor, **bound)

    @property
    def dtype(self) -> torch.dtype:
        assert isinstance(self.x, Tensor)
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        assert isinstance(self.x, Tensor)
        return self.x.device


@dataclass(frozen=True)
class Extended:
    """A flat run of ``size`` elements between others, which are read and never written."""

    before: Tensor
    x: Readable  # Writable, where it is written
    size: int
    after: Tensor

    def block(self, b: Block) -> Tensor:
        before, own, after = self._cut(b)
        parts = (self.before[before], read(self.x, own).reshape(-1), self.after[after])
        return torch.cat(parts).view(b.shape)

    def write_(self, b: Block, new: Tensor) -> None:
        before, own, _ = self._cut(b)
        first = before.stop - before.start
        write_(
            cast(Writable, self.x),
            own,
            new.reshape(-1)[first : first + own.shape[2]].view(own.shape),
        )

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

    ``row`` is [mats, rows, 1] and ``col`` [mats, 1, cols]. They may wait in a batch of launches:
    only a pass may read them.
    """

    x: Readable
    row: Tensor
    col: Tensor
    scale: Tensor | float = 1.0

    def block(self, b: Block) -> Tensor:
        if self._is_small(b):
            return self._of_small(b)
        return self._by_column(b).mul_(self._rows(b))

    def subtract_from_(self, old: Tensor, b: Block, factor: float) -> Tensor:
        """old ← old − factor · this, with one pass less than in two steps."""
        if self._is_small(b):
            return old.sub_(self._of_small(b), alpha=factor)
        return old.addcmul_(self._by_column(b), self._rows(b), value=-factor)

    def _rows(self, b: Block) -> Tensor:
        row = self.row[b.mats, b.rows]
        return row if isinstance(self.scale, float) and self.scale == 1 else row * self.scale

    def _by_column(self, b: Block) -> Tensor:
        x, col = read(self.x, b), self.col[b.mats, :, b.cols]
        return torch.mul(x, col, out=room(x, self.x))

    def _of_small(self, b: Block) -> Tensor:
        x, row, col = read(self.x, b), self._rows(b).squeeze(2), self.col[b.mats].squeeze(1)
        return small.scale_(x, row, col, room(x, self.x))

    def _is_small(self, b: Block) -> bool:
        return small.holds_whole(b, len(self.row), self.row.shape[1], self.col.shape[2])

    def times(self, factor: Tensor | float) -> "Quotient":
        return replace(self, scale=self.scale * factor)

    def source(self) -> Source | None:
        x = source_of(self.x)
        if x is None or x.form != "IS_RUN":
            return None
        factors = {"row": self.row.contiguous(), "col": self.col.contiguous()}
        return x.plus("IS_QUOTIENT", factors, scale=self.scale)


@dataclass(frozen=True)
class RunQuotient:
    """x / sqrt(v) · scale: an update by a second moment that is a run like ``x``."""

    x: Readable
    v: Tensor
    scale: Tensor | float = 1.0

    def block(self, b: Block) -> Tensor:
        v = part(self.v, b)
        inverse = torch.rsqrt(v, out=scratch.like(v))
        return inverse.mul_(read(self.x, b)).mul_(self.scale)

    def times(self, factor: Tensor | float) -> "RunQuotient":
        return replace(self, scale=self.scale * factor)

    def source(self) -> Source | None:
        x = source_of(self.x)
        if x is None or x.form != "IS_RUN":
            return None
        return x.plus("IS_VECTOR", {"v": self.v}, scale=self.scale)


@dataclass(frozen=True)
class Residual:
    """u − m, the momentum m ← m + weight · (u − m) advanced as a block is read: read each once."""

    u: Readable
    m: Tensor
    weight: float

    def block(self, b: Block) -> Tensor:
        u = read(self.u, b)
        m = advance_(self.m, b, u, self.weight)
        return torch.sub(u, m, out=room(u, self.u))

    def source(self) -> Source | None:
        u = source_of(self.u)
        if u is None or u.form != "IS_QUOTIENT":
            return None
        return u.plus("IS_RESIDUAL", {"m": self.m}, weight=self.weight)


@dataclass(frozen=True)
class Sum:
    """x + weight · y."""

    x: Readable
    y: Readable
    weight: float

    def block(self, b: Block) -> Tensor:
        x = read(self.x, b)
        return torch.add(x, read(self.y, b), alpha=self.weight, out=room(x, self.x))

    def source(self) -> Source | None:
        x, kept = source_of(self.x), kept_of(self.y)
        if x is None or kept is None or x.kept is not None:
            return None
        return replace(x.plus(x.form, {}, decay=self.weight), kept=kept)


@dataclass(frozen=True)
class RootQuotient:
    """(m / c1) / (sqrt(v / c2) + eps): Adam's update, ``c1`` and ``c2`` correcting the bias."""

    m: Writable
    v: Writable
    eps: float
    c1: float = 1.0
    c2: float = 1.0

    def block(self, b: Block) -> Tensor:
        return self.of(read(self.m, b), read(self.v, b))

    def of(self, m: Tensor, v: Tensor) -> Tensor:
        """The same of these values, which stay as they are."""
        divisor = torch.sqrt(v, out=scratch.like(v))
        torch.add(_as(self.eps * self.c1, v), divisor, alpha=self.c1 / self.c2**0.5, out=divisor)
        return torch.div(m, divisor, out=divisor)

    def source(self) -> Source | None:
        if not isinstance(self.m, Tensor) or not isinstance(self.v, Tensor):
            return None
        a, b = self.c1 / self.c2**0.5, self.eps * self.c1
        return Source("IS_ADAM", {"m": self.m, "v": self.v}, {"a": a, "b": b})


@dataclass(frozen=True)
class AdamStep:
    """Adam's update ``u``, its moments advanced by ``g`` as a block is read: read each once.

    Where the moments are kept in 8 bits, the update is made before they are rounded: a v rounded
    to 0 would divide by eps alone.
    """

    u: RootQuotient
    g: Readable
    beta1: float
    beta2: float

    def block(self, b: Block) -> Tensor:
        g = read(self.g, b)
        m = advance_(self.u.m, b, g, 1 - self.beta1)
        v = advance_(self.u.v, b, torch.mul(g, g, out=room(g, self.g)), 1 - self.beta2)
        return self.u.of(m, v)

    def source(self) -> Source | None:
        g, u = source_of(self.g), self.u.source()
        if g is None or u is None or g.form != "IS_RUN":
            return None
        g = g.plus("IS_ADAM_STEP", u.tensors, **u.numbers)
        return g.plus(g.form, {}, beta1=1 - self.beta1, beta2=1 - self.beta2)


def advance_(m: Writable, b: Block, x: Tensor, weight: float) -> Tensor:
    """m ← m + weight · (x − m) for a block -> its new values, before they are rounded."""
    values = read(m, b)
    if is_part(values, m):
        return values.lerp_(x, weight)
    values = values.to(x.dtype).lerp_(x, weight)
    write_(m, b, values)
    return values


def times(x: Readable, factor: Tensor | float) -> Readable:
    """x · factor."""
    if isinstance(factor, int | float) and factor == 1:
        return x
    return x.times(factor) if isinstance(x, Quotient | RunQuotient) else Scaled(x, factor)


def square_sum(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """Sum of the squares of a run -> []. ``like`` gives device and dtype where the run is empty."""
    (total,) = square_sums((x,), shard, like)
    return cast(Tensor, total)


@launches.tried(launches.square_sums)
def square_sums(runs: Sequence[Readable], shard: Shard, like: Gradient) -> list[Tensor]:
    """Sums of the squares of several runs, in one pass over what they have in common -> [] each."""
    dtype = accumulator(like.dtype)
    totals = [torch.zeros((), dtype=dtype, device=like.device) for _ in runs]
    for b in scratch.blocks(shard):
        for x, total in zip(runs, totals, strict=True):
            v = read(x, b).reshape(-1)
            total += torch.dot(v, v)
    return totals


def count_beyond(x: Readable, bound: float, shard: Shard, like: Gradient) -> Tensor:
    """How many elements of a run lie outside ± ``bound`` -> []."""
    launches.launch()
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for b in scratch.blocks(shard):
        total += (read(x, b).abs() > bound).sum()
    return total


@launches.tried(launches.matrix_square_sums)
def matrix_square_sums(x: Readable, shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Sums of the squares of a run over each row and column -> [mats, rows], [mats, cols].

    Rows and columns outside the run are 0, so that summing over ranks gives the whole matrix's.
    """
    row, col = _zeros(shard, like)
    ones = torch.ones(max(shard.rows, shard.cols), dtype=row.dtype, device=row.device)
    for b in scratch.blocks(shard):
        if small.holds_whole(b, shard.mats, shard.rows, shard.cols):
            planes = small.square_planes(read(x, b))
            small.write_row_sums(row[b.mats], planes)
            small.write_col_sums(col[b.mats], planes)
            continue
        square = squared(x, b)
        _, rows, cols = b.shape
        # products with ones are faster by far than sums over a dimension
        row[b.mats, b.rows].add_(square @ ones[:cols])
        col[b.mats, b.cols].add_(ones[:rows] @ square)
    return row, col


@launches.tried(launches.weighed_square_sums)
def weighed_square_sums(
    x: Readable, before: Tensor, eps: float, beta: float, shard: Shard, like: Gradient
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the sums over each column of squares divided by a number of their row.

    That is the row's new statistic, beta · ``before`` + (1 − beta) · mean(x² + eps), which is known
    as soon as the row is read where runs hold whole rows. -> [mats, rows], [mats, cols],
    [mats, cols]
    """
    assert shard.holds_rows
    row, col = _zeros(shard, like)
    both = col.new_zeros(2, shard.mats, shard.cols).transpose(0, 1)
    ones, share = col.new_ones(shard.cols), (1 - beta) / shard.cols
    for b in scratch.blocks(shard):
        old = torch.mul(before[b.mats, b.rows], beta, out=scratch.like(before[b.mats, b.rows]))
        old += (1 - beta) * eps
        if small.holds_whole(b, shard.mats, shard.rows, shard.cols):
            planes, sums = small.square_planes(read(x, b)), row[b.mats]
            small.write_row_sums(sums, planes)
            small.write_col_sums(both[b.mats, 0], planes)
            small.scale_rows_(planes, old.add_(sums, alpha=share).reciprocal_())
            small.write_col_sums(both[b.mats, 1], planes)
            continue
        square = squared(x, b)
        mats, rows, _ = b.shape
        sums = torch.matmul(square, ones, out=row[b.mats, b.rows])
        weights = col.new_ones(mats, 2, rows)
        torch.add(old, sums, alpha=share, out=weights[:, 1]).reciprocal_()
        both[b.mats].baddbmm_(weights, square)
    return row, both[:, 0], both[:, 1]


@launches.tried(launches.factors_)
def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> tuple[Tensor, Tensor]:
    """v ← beta · v + (1 − beta) · mean(x² + eps) for a matrix's statistics ``row`` and ``col``,
    ``sums`` being those of x² -> factors [mats, rows, 1], [mats, 1, cols] of 1 / sqrt(v).

    The estimate of v is row · col / mean(row). With ``weighed_square_sums`` as a third of the
    sums, the factors are such that RMS(x / sqrt(v)) is ``clip`` at most.
    """
    by_col = torch.empty_like(col)
    by_row = torch.ones_like(row[:1]) if shard.rows == 1 else torch.empty_like(row)
    u_sq = row.new_zeros(())
    for mats in scratch.parts(shard.mats, max(shard.rows, shard.cols)):
        mean = _advance_mean_(row[mats], sums[0][mats], shard.cols, eps, 1 - beta)
        _advance_mean_(col[mats], sums[1][mats], shard.rows, eps, 1 - beta)
        torch.rsqrt(col[mats], out=by_col[mats])
        if shard.rows > 1:
            torch.div(row[mats], mean, out=by_row[mats]).rsqrt_()
        if len(sums) > 2:
            weighed = torch.div(sums[2][mats], col[mats], out=scratch.like(col[mats]))
            u_sq += torch.dot(mean.view(-1), small.sums(weighed))
    if len(sums) > 2:
        by_row *= (clip / shard.rms(u_sq)).clamp(max=1)
    return by_row.expand_as(row).unsqueeze(-1), by_col.unsqueeze(-2)


def _advance_mean_(v: Tensor, sums: Tensor, of: int, eps: float, weight: float) -> Tensor:
    """v ← v + weight · (sums / of + eps − v), of many matrices [mats, n] -> its means [mats, 1]."""
    v.lerp_(torch.div(sums, of, out=scratch.like(v)).add_(eps), weight)
    return v if v.shape[1] == 1 else (small.sums(v) / v.shape[1]).unsqueeze(1)


def _zeros(shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Sums over rows and over columns of nothing."""
    dtype = accumulator(like.dtype)
    row = torch.zeros(shard.mats, shard.rows, dtype=dtype, device=like.device)
    return row, torch.zeros(shard.mats, shard.cols, dtype=dtype, device=like.device)


@launches.tried(launches.squares_)
def squares(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """The squares of a run where it lies in the whole parameter, 0 elsewhere -> [numel]."""
    make = torch.empty if len(shard) == shard.numel else torch.zeros
    out = make(shard.numel, dtype=accumulator(like.dtype), device=like.device)
    own = out[shard.start : shard.stop]
    for b in scratch.blocks(shard):
        values = read(x, b)
        torch.mul(values, values, out=part(own, b))
    return out


def advance_numbers_(row: Tensor, col: Tensor, squares: Tensor, eps: float, beta: float) -> Tensor:
    """v ← beta · v + (1 − beta) · (x² + eps), of matrices of one element, whose statistics ``row``
    and ``col`` are both v, [n] -> the sum of x² / v, [].
    """
    total = row.new_zeros(())
    for at in scratch.parts(len(row), 1):
        v, x_sq = row[at], squares[at]
        new = torch.add(x_sq, eps, out=scratch.like(v))
        col[at].copy_(v.lerp_(new, 1 - beta))
        total += torch.dot(x_sq, torch.reciprocal(v, out=new))
    return total


def squared(x: Readable, b: Block) -> Tensor:
    """The squares of a block, which are the caller's."""
    values = read(x, b)
    return torch.mul(values, values, out=room(values, x))


@launches.tried(launches.lerp_)
def lerp_(m: Tensor, x: Readable, weight: float, shard: Shard) -> None:
    """m ← m + weight · (x − m), for a run."""
    for b in scratch.blocks(shard):
        advance_(m, b, read(x, b), weight)


@launches.tried(launches.square_lerp_)
def square_lerp_(v: Tensor, x: Readable, eps: float, weight: float, shard: Shard) -> None:
    """v ← v + weight · (x² + eps − v), for a run."""
    for b in scratch.blocks(shard):
        advance_(v, b, squared(x, b).add_(eps), weight)


@launches.tried(launches.apply_)
def apply_(
    p: Writable,
    u: Readable,
    shard: Shard,
    *,
    lr: Tensor | float,
    weight_decay: Tensor | float = 0.0,
) -> None:
    """p ← p · (1 − lr · weight_decay) − lr · u, for a run of weights.

    The change is added up before it meets p, as p − lr · (u + weight_decay · p): 1 − lr ·
    weight_decay would round alike at every step.
    """
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0
    if isinstance(lr, Tensor):
        u, weight_decay, lr = times(u, lr), lr * weight_decay, 1.0
    if isinstance(u, Tensor) and not decays and getattr(p, "dtype", None) == u.dtype:
        _subtract_(p, u, lr)  # in one pass
        return
    for b in scratch.blocks(shard):
        old = read(p, b)
        if decays:
            change = read(u, b)
            change = torch.addcmul(change, old, _as(weight_decay, old), out=room(change, u))
            old.sub_(change, alpha=lr)
        elif isinstance(u, Quotient):
            u.subtract_from_(old, b, lr)
        else:
            _subtract_(old, read(u, b), lr)
        if not is_part(old, p):
            write_(p, b, old)


def _subtract_(p: Any, u: Tensor, lr: float) -> None:
    """p ← p − lr · u, in whatever way p does that: with the same bits in one piece and in blocks.

    ``sub_`` would round lr to 16 bits where p has 16.
    """
    p.addcmul_(u, torch.ones((), dtype=u.dtype, device=u.device), value=-lr)


def _as(x: Tensor | float, like: Tensor) -> Tensor:
    """A number as a tensor []."""
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)


def evaluate(x: Readable, shard: Shard, like: Gradient) -> Tensor:
    """The values of a run, [len(shard)], as a tensor: for what is small beside the parameter."""
    launches.launch()
    values = torch.empty(len(shard), dtype=accumulator(like.dtype), device=like.device)
    for b in scratch.blocks(shard):
        write_(values, b, read(x, b))
    return values


def pad(x: Tensor, part: slice, like: Tensor) -> Tensor:
    """Zeros shaped as ``like`` with ``x`` as the elements ``part``, counted flat."""
    whole = torch.zeros_like(like)
    whole.view(-1)[part] = x
    return whole
