"""The specification of each pass, in plain torch over the run of one parameter.

Rules call the functions of the same names in ``ops.functions``, which describe the arguments. A
pass reads the run in blocks of at most ``block_sizes.product_limit`` elements, so a lazy expression
needs only a few blocks of memory. On a GPU no pass makes the host wait.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_ext.ops import block_sizes
from ds_ext.ops.expressions import (
    Gradient,
    Number,
    PaddedToGroups,
    Quotient,
    Readable,
    Source,
    Writable,
    accumulator,
    is_part,
    read,
    root,
    times,
    write_,
)
from ds_ext.ops.moments import advance_
from ds_ext.ops.shard import Block, Shard

# The largest factor: zero rows and columns stay zero under repeated scaling, and the product of a
# row's and a column's factor is finite in fp32.
LARGEST = 1e18


class Reference:
    """The passes over the run of one parameter, in plain torch.

    Blocks have at most ``limit`` elements; ``shard.BLOCK`` if None.
    """

    def __init__(self, shard: Shard, limit: int | None = None) -> None:
        self.shard, self.limit = shard, limit

    def joins(self, name: str, source: Source) -> bool:
        """Returns whether the pass ``name`` may read ``source`` together with equal runs."""
        return False

    def square_sums(self, runs: Sequence[Readable], like: Gradient) -> Sequence[Tensor]:
        """Sums of squares of several runs, block by block."""
        dtype = accumulator(like.dtype)
        totals = [torch.zeros((), dtype=dtype, device=like.device) for _ in runs]
        for b in self.shard.blocks(self.limit):
            for x, total in zip(runs, totals, strict=True):
                v = read(x, b).reshape(-1)
                total += torch.dot(v, v)
        return totals

    def row_col_square_sums(self, x: Readable, like: Gradient) -> tuple[Tensor, Tensor]:
        """Sums over each row and column, 0 outside the run."""
        row, col = _zeros(self.shard, like)
        for b in self.shard.blocks(self.limit):
            square = squared(x, b)
            row[b.mats, b.rows] += square.sum(2)
            col[b.mats, b.cols] += square.sum(1)
        return row, col

    def weighted_square_sums(
        self, x: Readable, before: Tensor, eps: float, beta: float, like: Gradient
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row sums, column sums, and column sums of squares divided by their row's new v."""
        assert self.shard.holds_rows
        row, col = _zeros(self.shard, like)
        weighted = torch.zeros_like(col)
        for b in self.shard.blocks(self.limit):
            square = squared(x, b)
            sums = square.sum(2)
            row[b.mats, b.rows] = sums
            col[b.mats] += square.sum(1)
            new = before[b.mats, b.rows] * beta + (1 - beta) * (sums / self.shard.cols + eps)
            weights = new.reciprocal_().clamp_(max=LARGEST**2)  # 0 / 0 is 0
            weighted[b.mats] += square.mul_(weights.unsqueeze(2)).sum(1)
        return row, col, weighted

    def factors_(
        self,
        row: Tensor,
        col: Tensor,
        sums: tuple[Tensor, ...],
        eps: float,
        beta: float,
        clip: float,
    ) -> tuple[Tensor, Tensor]:
        """Advances the statistics; v is estimated as row · col / mean(row)."""
        _advance_mean_(row, sums[0], self.shard.cols, eps, 1 - beta)
        _advance_mean_(col, sums[1], self.shard.rows, eps, 1 - beta)
        mean = row.sum(1, keepdim=True) / max(self.shard.rows, 1)
        by_col = _inverse_root(col, col)
        by_row = torch.ones_like(row) if self.shard.rows == 1 else _inverse_root(row / mean, row)
        if len(sums) > 2:
            divisor = col.masked_fill(col == 0, 1)  # of a sum that is 0 too
            u_sq = torch.sum(mean * (sums[2] / divisor))
            by_row *= (clip / self.shard.rms(u_sq)).clamp(max=1)
        return by_row.unsqueeze(-1), by_col.unsqueeze(-2)

    def lerp_(self, m: Writable, x: Readable, weight: float) -> None:
        """m ← m + weight · (x − m), for a run."""
        for b in self.shard.blocks(self.limit):
            advance_(m, b, read(x, b), weight)

    def square_lerp_(self, v: Tensor, x: Readable, eps: float, weight: float) -> None:
        """v ← v + weight · (x² + eps − v), for a run."""
        for b in self.shard.blocks(self.limit):
            advance_(v, b, squared(x, b).add_(eps), weight)

    def apply_(
        self, p: Writable, u: Readable, lr: Tensor | float, weight_decay: Tensor | float
    ) -> None:
        """p ← p − lr · (u + weight_decay · p)."""
        for x in (p, u):
            if isinstance(x, Tensor) and x.numel() != len(self.shard):
                raise ValueError(f"{x.numel()} elements do not fit a run of {len(self.shard)}")
        decays = isinstance(weight_decay, Tensor) or weight_decay != 0
        if isinstance(lr, Tensor):
            u, weight_decay, lr = times(u, lr), lr * weight_decay, 1.0
        limit = self.limit
        if isinstance(p, PaddedToGroups):  # whose passes are found without its device
            limit = block_sizes.product_limit(p.before.device)
        for b in self.shard.blocks(limit):
            old = read(p, b)
            change = read(u, b)
            if decays:
                change = (old * weight_decay).add_(change)
            one = torch.ones((), dtype=change.dtype, device=change.device)
            old.addcmul_(change, one, value=-lr)  # ``sub_`` would not round the product separately
            if not is_part(old, p):
                write_(p, b, old)

    def unit_quotient(self, x: Readable, like: Gradient) -> Quotient:
        """x with factors of 1."""
        dtype = accumulator(like.dtype)
        row = torch.ones(self.shard.mats, self.shard.rows, 1, dtype=dtype, device=like.device)
        return Quotient(x, row, row.new_ones(self.shard.mats, 1, self.shard.cols))

    def normalize_rows(self, x: Quotient, sums: Tensor, least: Number) -> Quotient:
        """x with the row factors that give rows of norm √cols."""
        return replace(x, row=normalized(x.row, sums.unsqueeze(-1), self.shard.cols**0.5, least))

    def normalize_columns(self, x: Quotient, sums: Tensor, least: Number) -> Quotient:
        """x with the column factors that give columns of norm √rows."""
        return replace(x, col=normalized(x.col, sums.unsqueeze(-2), self.shard.rows**0.5, least))

    def normalize_whole_rows(
        self, x: Quotient, least: Number, like: Gradient
    ) -> tuple[Quotient, Tensor]:
        """Normalizes each row as soon as it is read, and adds up its new squares over columns."""
        assert self.shard.holds_rows
        row, root = torch.zeros_like(x.row), self.shard.cols**0.5
        sums = row.new_zeros(self.shard.mats, self.shard.cols)
        for b in self.shard.blocks(self.limit):
            values = read(x.x, b)
            square = (values * x.col[b.mats]).square_()
            before = x.row[b.mats, b.rows].squeeze(-1)
            norms = before.abs() * square.sum(2).sqrt_()
            new = (before * (root / norms.clamp(min=least))).clamp_(max=LARGEST)
            row[b.mats, b.rows, 0] = new
            sums[b.mats] += square.mul_(new.square().unsqueeze(2)).sum(1)
        return replace(x, row=row), sums


def _advance_mean_(v: Tensor, sums: Tensor, of: int, eps: float, weight: float) -> None:
    """v ← v + weight · (sums / of + eps − v); an empty matrix has sums of 0."""
    v.lerp_((sums / max(of, 1)).add_(eps), weight)


def _inverse_root(ratio: Tensor, v: Tensor) -> Tensor:
    """1 / sqrt(ratio), at most ``LARGEST``; 0 where the statistic v is 0, as then the input is."""
    return ratio.rsqrt().clamp_(max=LARGEST).masked_fill_(v == 0, 0)


def _zeros(shard: Shard, like: Gradient) -> tuple[Tensor, Tensor]:
    """Row sums and column sums, all zero."""
    dtype = accumulator(like.dtype)
    row = torch.zeros(shard.mats, shard.rows, dtype=dtype, device=like.device)
    return row, torch.zeros(shard.mats, shard.cols, dtype=dtype, device=like.device)


def squared(x: Readable, b: Block) -> Tensor:
    """The squares of a block; the caller may overwrite them."""
    values = read(x, b)
    return values * values


def normalized(factor: Tensor, sums: Tensor, norm: Tensor | float, least: Number) -> Tensor:
    """The factors that change norms from the roots of ``sums`` to ``norm``."""
    ratio = norm / root(sums).clamp(min=least)
    return torch.mul(factor, ratio).clamp_(max=LARGEST)
