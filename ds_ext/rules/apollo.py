"""APOLLO: scales rows or columns of the gradient as Adam scales them in a random projection.

Zhu et al., arXiv 2412.05270, algorithm 1, as in the authors' apollo_torch: the root of ``scale``
follows the norm-growth limiter, bias correction is a factor, eps is added to the uncorrected root,
weight decay follows the update, and a renewed projection keeps the moments. There are two
differences. The projection has the same bits on every device and for any number of ranks. The
update after an update of 0 is not limited: the authors' code would limit all updates after a
gradient of 0, as for an expert that no token has reached, to a growth of 1 % per step from 1e-8.

    A channel is a row of G if rows >= cols, else a column.
    P [short side, rank] ~ N(0, 1 / rank), new each update_proj_gap steps
    R = G · P, or Gᵀ · P  [channels, rank]
    m ← EMA, by beta1, of R,  v ← EMA, by beta2, of R²,  N = m / (sqrt(v) + eps)
    a = ‖N‖ / (‖R‖ + 1e-8), of each channel, or of all of them together
    U = G, its channels times a;  U ← U / l,  l = max(‖U‖ / (n + 1e-8), 1.01) / 1.01 if n > 0
    n ← ‖U‖
    p ← p − lr · c · sqrt(scale) · U,  c = sqrt(1 − beta2^t) / (1 − beta1^t)
    p ← p (1 − lr · weight_decay)

State: ``m`` and ``v`` are the authors' exp_avg and exp_avg_sq, transposed if cols > rows. ``n`` is
their scaled_grad. ``q`` holds the rows of P that the run touches, or all of P if rows >= cols, in
bf16 for bf16 gradients. Checkpoints leave it out: a step without it draws it again, from
``stream``. Other values of ``seed`` or ``update_proj_gap`` take effect when P is renewed.

A step takes two rounds. The first round sums R and the squares of each channel. Each rank then
advances the moments of its share of the channels, 8 · rank · channels / d bytes. The second round
sends ‖N‖² and ‖R‖² of each channel to all ranks. ‖U‖² = sum(a² · ‖channel‖²) needs no round of its
own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.hyperparams import Count, Fraction, NonNegative, Positive, Scaling, Size
from ds_ext.ops import joint
from ds_ext.ops.joint import Joint
from ds_ext.ops.normal import normals
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import Rounds, State, register

GROWTH = 1.01  # largest ratio of an update's norm to the previous one
TINY = 1e-8  # added to norms that divide

STATE = (
    "8·r/(S·d) for moments + 4·r/L for a projection (2 in bf16), replicated if R >= C, "
    "r the rank, S and L the short and the long side"
)


@register(paper="2412.05270", state=STATE, rounds="2", others={"type": "AdamW"})
@dataclass(frozen=True)
class APOLLO:
    """Scales the gradient's channels as Adam would scale them (arXiv 2412.05270)."""

    lr: NonNegative = 1e-3  # learning rate
    rank: Count = 256  # dimensions of the projected gradient
    update_proj_gap: Count = 200  # steps between renewals of the projection
    scale: Positive = 1.0  # an update is multiplied by its root
    scale_type: Scaling = "channel"  # a factor for each channel, or one for the tensor
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay of the averages of R and of R²
    eps: Positive = 1e-6  # added to the divisor
    weight_decay: NonNegative = 0.0  # decoupled, times lr
    seed: Size = 0  # of the projections

    def state_spec(self, shard: Shard) -> Parts:
        own, n = _own_channels(shard), max(shard.rows, shard.cols)
        moment = Part.of(slice(own.start * self.rank, own.stop * self.rank), n * self.rank)
        side = _projected_side(shard)
        q = Part.cache(side.stop - side.start, self.rank)
        return {"m": moment, "v": moment, "n": Part.whole(), "stream": Part.stream(), "q": q}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        (beta1, beta2), own = self.betas, _own_channels(shard)
        q, dtype = s.get("q"), ops.operand_dtype(g)
        # A bf16 gradient is projected by bf16 numbers on any processor.
        stored = torch.bfloat16 if g.dtype == torch.bfloat16 else dtype
        if q is None or q.dtype != stored or (t - 1) % self.update_proj_gap == 0:
            q = self.drawn(s, t, shard).to(stored)
        row_sq, col_sq = yield from joint.row_col_square_sums(g, shard, g)
        g_sq = row_sq if _is_tall(shard) else col_sq
        of = _by_rows if _is_tall(shard) else _by_cols
        shape, terms = (max(shard.rows, shard.cols), self.rank), ops.terms_for(dtype)
        r = yield from joint.summed(g, q.to(dtype), shard, shape, of, terms)
        r, g_sq = yield r, g_sq

        s["q"], r = q, r[own]
        adam = ops.AdamStep(ops.RootQuotient(s["m"], s["v"], self.eps), r.view(-1), beta1, beta2)
        whole = Shard.whole(tuple(r.shape))
        u_sq, _ = yield from joint.row_col_square_sums(adam, whole, r)
        own_sq, _ = yield from joint.row_col_square_sums(r.view(-1), whole, r)
        del r, adam  # the joint operation waits for other matrices
        n_sq, r_sq = yield tuple([ops.pad(x, own, g_sq) for x in (u_sq, own_sq)])

        factor = (1 - beta2**t) ** 0.5 / (1 - beta1**t) * self.scale**0.5
        factor *= 1 - self.lr * self.weight_decay  # weight decay follows the update
        sides = _is_tall(shard), min(shard.rows, shard.cols)
        limited = _Limited(factor, self.scale_type == "tensor", *sides)
        row, col, n = yield Joint(limited, n_sq, r_sq, g_sq, s["n"])
        s["n"].copy_(n)
        u = ops.Quotient(g, row, col)
        yield from joint.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    def drawn(self, s: State, t: int, shard: Shard) -> Tensor:
        """Returns the rows of P that a run needs in step ``t``."""
        side, draw = _projected_side(shard), (t - 1) // self.update_proj_gap
        numbers = slice(side.start * self.rank, side.stop * self.rank)
        q = normals(s["stream"], self.seed, draw, numbers).to(s["m"].dtype).mul_(self.rank**-0.5)
        return q.view(-1, self.rank)


@register(
    paper="2412.05270",
    state=STATE + ", r = 1",
    rounds="2",
    others={"type": "AdamW"},
    spelling="APOLLO-Mini",
)
@dataclass(frozen=True)
class APOLLOMini(APOLLO):
    """APOLLO of rank 1, with one factor for the whole gradient (arXiv 2412.05270)."""

    rank: Count = 1  # dimensions of the projected gradient
    scale: Positive = 128.0  # an update is multiplied by its root
    scale_type: Scaling = "tensor"  # a factor for each channel, or one for the tensor


@dataclass(frozen=True)
class _Limited:
    """The joint operation that makes the factors of channels from sums of squares."""

    factor: float  # of all updates
    is_by_tensor: bool  # whether all channels of a matrix have one factor
    is_tall: bool  # whether channels are rows
    others: int  # columns, or rows if channels are columns

    def __call__(self, n_sq: Tensor, r_sq: Tensor, g_sq: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        """Returns the factors of rows and columns, and the norms of limited updates.

        Args:
            n_sq: of N, by channel, [matrices, channels].
            r_sq: of R, likewise.
            g_sq: of G, likewise.
            n: the norms of the previous updates, [matrices].
        """
        if self.is_by_tensor:
            n_sq, r_sq = n_sq.sum(1, keepdim=True), r_sq.sum(1, keepdim=True)
        a = n_sq.sqrt() / (r_sq.sqrt() + TINY)
        norm = (a.square() * g_sq).sum(1).sqrt()
        limit = (norm / (n + TINY)).clamp(min=GROWTH) / GROWTH
        limit = limit.where(n > 0, 1.0)
        a = (a * (self.factor / limit).unsqueeze(1)).expand(g_sq.shape).contiguous()
        ones = a.new_ones(len(a), self.others)
        row, col = (a, ones) if self.is_tall else (ones, a)
        return row[:, None, :, None], col[:, None, None], norm / limit


def _is_tall(shard: Shard) -> bool:
    """Whether a matrix's channels are its rows."""
    return shard.rows >= shard.cols


def _projected_side(shard: Shard) -> slice:
    """The rows of P that a run needs."""
    return slice(0, shard.cols) if _is_tall(shard) else shard.touched


def _by_rows(shard: Shard, b: Block, x: Tensor, q: Tensor) -> ops.PlacedProduct:
    return (b.rows, slice(None)), x, q[:, b.cols]


def _by_cols(shard: Shard, b: Block, x: Tensor, q: Tensor) -> ops.PlacedProduct:
    first = shard.touched.start
    return (b.cols, slice(None)), x.mT, q[:, b.rows.start - first : b.rows.stop - first]


def _own_channels(shard: Shard) -> slice:
    """The channels whose moments a rank keeps, divided in the same proportions as the matrix."""
    n, numel = max(shard.rows, shard.cols), max(shard.numel, 1)
    return slice(n * shard.start // numel, n * shard.stop // numel)
