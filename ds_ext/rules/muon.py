"""Muon: steps by a momentum with all singular values brought near 1.

K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with the settings
of torch.optim.Muon: weight decay and the two scales of Liu et al., arXiv 2502.16982.

    m ← EMA, by momentum, of g,  x = g + momentum · (m − g), or m without Nesterov
    X = x / ‖x‖;  ns_steps times, on the short side:  A = X·Xᵀ,  X ← (a·I + b·A + c·A²)·X
    p ← p (1 − lr · weight_decay) − lr · scale · X

If one rank holds the whole matrix, it iterates on X. Otherwise every X is a polynomial of the first
A, times the first X, so one rank iterates on the short side's Gram matrix A, S x S, and one product
at the end gives a rank's part of the update.

NorMuon (Li et al., arXiv 2510.05491, as in the authors' code) is Muon with ``beta2``:

    v ← EMA, by beta2, of each row's mean of X²,  Y = X with each row divided by sqrt(v)
    X ← Y · ‖X‖ / ‖Y‖

State: ``m`` is a run like the weight, in fp32 or in 8 bits (``ops.companding``). The update uses m
before it is rounded. ``v`` is a number per row. Communication of a step, with short side S:
  rows >= cols    One round of S·(S + 1)/2 fp32 sums, because a run consists of whole rows. If cuts
                  split rows, a round before it completes these rows.
  rows < cols     One round of the whole x in fp32, because products of the short side's rows need
                  all rows: 4·rows·cols bytes on each rank until the step of its bucket ends. The
                  same applies if tensor parallelism splits a matrix.
  both            One round of S·(S + 1)/2 numbers, the product of all iterations. One rank computes
                  it with about 1.3·S³·(4·ns_steps − 3) operations. The ranks share the matrices
                  of a bucket by this cost.
  beta2           One round of a number per row.
  nbits 8         One round where a cut splits 32 elements: ``ops.companding``.
There is no round if one rank holds a whole matrix. ``newton_schulz`` says why bf16 adds no round.

``ns_dtype`` is the dtype of products; sums and X are fp32 (all are fp64 for fp64 parameters). With
"bf16", operands have one bf16 term if a rank holds the whole matrix, else two. For the spectra in
the tests, the update is within 1e-2 of the fp64 iteration, and within 1e-3 with "fp32". torch's
bf16 is off by 1e-2 to 1. Processors without fast bf16 products multiply fp32 numbers.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.hyperparams import (
    Adjustment,
    Bits,
    Coefficients,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Precision,
)
from ds_ext.ops import formats, joint
from ds_ext.ops.companding import of_bits
from ds_ext.ops.joint import Joint, Operation
from ds_ext.ops.products import Product, product, symmetric_product
from ds_ext.ops.shard import BLOCK, Block, Shard, outward
from ds_ext.ops.state import Part, Parts
from ds_ext.rules import newton_schulz
from ds_ext.rules.base import Rounds, State, Sums, register
from ds_ext.rules.newton_schulz import pack, polynomial, steps_of, unpack

TINY = 1e-10  # added to roots that divide
# By ``ns_dtype``, the bf16 terms of an operand: if one rank has the whole matrix, and if not.
TERMS = {"bf16": (1, 2), "fp32": (3, 3)}


@register(
    paper="2502.16982",
    state="4/d; 1.06/d with 8-bit momentum",
    rounds="2; 1 more each where a cut goes through a row, through 32 elements of 8-bit momentum, "
    "and with beta2",
    others={"type": "AdamW"},
    has_sections=True,
    shared_work=lambda rule, shard: rule.operations(shard),
)
@dataclass(frozen=True)
class Muon:
    """Momentum with all singular values near 1 (arXiv 2502.16982)."""

    lr: NonNegative = 1e-3  # learning rate
    momentum: Fraction = 0.95  # decay of the average of g
    nesterov: bool = True  # steps by g and the average together
    weight_decay: NonNegative = 0.1  # decoupled, times lr
    # of each step; a single triple, or the last of a list, serves all further steps
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315)
    ns_steps: Count = 5  # steps of the Newton-Schulz iteration
    ns_dtype: Precision = "bf16"  # of its matrix products; sums are fp32
    eps: Positive = 1e-7  # least norm
    # lr's factor: sqrt(max(1, rows / cols)), or 0.2 · sqrt(max(rows, cols))
    adjust_lr_fn: Adjustment = "original"
    # NorMuon: divides rows by an RMS that decays at this rate; null: Muon
    beta2: Fraction | None = None
    nbits: Bits = 32  # bits of a moment's element

    def state_spec(self, shard: Shard) -> Parts:
        m = formats.state_spec(of_bits(self.nbits), shard)
        return {"m": m} if self.beta2 is None else {"m": m, "v": Part.whole(shard.rows)}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        x = yield from self.moved(p, g, s, shard)
        if not shard.is_cut and not len(shard):
            return  # another rank holds the whole matrix, and needs no sums
        has_rows = shard.is_cut and shard.split is None and shard.cols <= min(shard.rows, BLOCK)
        u = yield from (self.by_rows if has_rows else self.by_wholes)(x, shard)
        if self.beta2 is not None:
            u = yield from self.normalized(u, s["v"], shard, x)
        u = ops.times(u, self.scale(shard))
        yield from joint.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    def moved(
        self, p: ops.Writable, g: ops.Gradient, s: State, shard: Shard
    ) -> Generator[Sums, Sums, Tensor]:
        """Advances the momentum; returns x, [len(shard)]."""
        if self.nbits == 32:
            x = yield from joint.momentum(s["m"], g, shard, self.momentum, self.nesterov)
            if x is not None:
                return x
        stored, start = of_bits(self.nbits), shard.start
        size = stored.size
        _, runs, whole = yield from formats.whole_groups(p, g, shard, size)
        momentum = _Momentum(stored.opened(s["m"]), runs, self.momentum, self.nesterov)
        x = ops.evaluate(momentum, whole, g)
        before = start - outward(start, shard.stop, size, shard.numel).start
        return x[before : before + len(shard)]

    def normalized(
        self, u: ops.Readable, v: Tensor, shard: Shard, like: Tensor
    ) -> Generator[Sums, Sums, ops.Readable]:
        """Returns an update whose rows are divided by ``v``, scaled to the norm of ``u``."""
        assert self.beta2 is not None
        u = ops.evaluate(u, shard, like)
        sums = ops.row_col_square_sums(u, shard, like)[0].view(-1)
        if shard.is_cut:
            (sums,) = yield (sums,)
        v.lerp_(sums / shard.cols, 1 - self.beta2)
        row = 1 / (v.sqrt() + TINY)
        norm = (sums * row.square()).sum().sqrt()
        row = row * (sums.sum().sqrt() / (norm + TINY))
        return ops.Quotient(u, row.view(1, -1, 1), row.new_ones(1, 1, shard.cols))

    def by_rows(self, x: Tensor, shard: Shard) -> Generator[Sums, Sums, ops.Readable]:
        """Returns a tall matrix's update, from the rows of a rank: [rows, cols] · [cols, cols]."""
        edges, terms = _edges(x, shard), TERMS[self.ns_dtype][1]
        if edges:
            (totals,) = yield (torch.stack(tuple(edges.values())),)
            edges = dict(zip(edges, totals, strict=True))
        gram = x.new_zeros(shard.cols, shard.cols)
        for b in list(ops.blocks(shard, x)):  # views of x, which a yield may separate
            if b.rows.start not in edges:
                (part,) = yield Joint(self.gram, ops.read(x, b)[0])
                gram.add_(part)
        for row, values in edges.items():
            if shard.start <= row * shard.cols < shard.stop:  # exactly one rank adds the row
                gram.addr_(values, values)
        (packed,) = yield Joint(pack, gram)
        (packed,) = yield (packed,)
        return _Rows(x, edges, (yield from self.shared(self.factor, packed, shard)), terms)

    def by_wholes(self, x: Tensor, shard: Shard) -> Generator[Sums, Sums, ops.Readable]:
        """Returns the update from the whole matrix. A rank may hold any of its elements."""
        if not shard.is_cut:
            (u,) = yield Joint(self.orthogonalized, x.view(shard.rows, shard.cols))
            return u.reshape(-1)
        whole = x.new_zeros(shard.rows, shard.cols)
        for b in ops.blocks(shard, x):
            whole[b.rows, b.cols] = ops.read(x, b)[0]
        (whole,) = yield (whole,)
        own, wide = shard.touched, shard.rows < shard.cols
        q = yield from self.shared(self.factor_of_wholes, whole, shard)
        return Product(*((q[own], whole) if wide else (whole[own], q)), own.start)

    def shared(self, factor: Operation, of: Tensor, shard: Shard) -> Generator[Sums, Sums, Tensor]:
        """Returns ``factor`` of a tensor, [short, short], which one rank computes for all."""
        if shard.has_turn:
            (packed,) = yield Joint(factor, of)
        else:
            short = min(shard.rows, shard.cols)
            packed = of.new_zeros((short + 1) // 2, short + 1)
        (packed,) = yield (packed,)
        (q,) = yield Joint(unpack, packed)
        return q

    # Joint operations, over stacks of the tensors of several matrices.

    def orthogonalized(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the last X of whole matrices, [n, rows, cols]."""
        terms = TERMS[self.ns_dtype][0]
        return (newton_schulz.orthogonalized(x, self.coefficients, self.eps, terms),)

    def gram(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the Gram matrices of the columns of ``x``, [n, rows, cols]."""
        return (symmetric_product(x.mT, x, TERMS[self.ns_dtype][1]),)

    def factor(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Returns the packed polynomials of packed Gram matrices."""
        return self._factor(*unpack(packed))

    def factor_of_wholes(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the packed polynomials of whole matrices, [n, rows, cols]."""
        return self._factor(*self.gram(x.mT if x.shape[1] < x.shape[2] else x))

    def _factor(self, gram: Tensor) -> tuple[Tensor, ...]:
        return pack(polynomial(gram, self.coefficients, self.eps, TERMS[self.ns_dtype][1]))

    def operations(self, shard: Shard) -> float:
        """Returns the operations of the rank that computes ``shared`` for a matrix."""
        short, long = sorted((shard.rows, shard.cols))
        of_gram = long if shard.rows < shard.cols else 0
        return 1.3 * short**2 * (short * (4 * self.ns_steps - 3) + of_gram)

    @property
    def coefficients(self) -> list[tuple[float, float, float]]:
        """The coefficients of each step of the iteration."""
        return steps_of(self.ns_coefficients, self.ns_steps)

    def scale(self, shard: Shard) -> float:
        """Returns the factor of an update for the shape of its matrix."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return float(0.2 * max(shard.rows, shard.cols) ** 0.5)
        return float(max(1, shard.rows / shard.cols) ** 0.5)


@dataclass(frozen=True)
class _Momentum:
    """x of a run ``g``. Reading a block, once, advances ``m``, and uses it before it is rounded."""

    m: ops.Writable
    g: ops.Readable
    momentum: float
    nesterov: bool

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols]. The caller may overwrite them."""
        g = ops.read(self.g, b)
        m = ops.advance_(self.m, b, g, 1 - self.momentum)
        return g.lerp(m, self.momentum) if self.nesterov else m.clone()


@dataclass(frozen=True)
class _Rows:
    """x · q, [rows, cols] · [cols, cols], of a run. ``edges`` has the rows that cuts split."""

    x: Tensor
    edges: dict[int, Tensor]  # by row number, [cols]
    q: Tensor
    terms: int  # of bf16 in a product's operands

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols]. The caller may overwrite them."""
        row = self.edges.get(b.rows.start)
        if row is not None:
            return (row @ self.q[:, b.cols]).view(b.shape)
        return product(ops.read(self.x, b)[0], self.q, self.terms).unsqueeze(0)


def _edges(x: Tensor, shard: Shard) -> dict[int, Tensor]:
    """A run's elements in rows that cuts split, by row number; [cols], 0 for missing elements."""
    cut = {at // shard.cols for cuts in shard.cuts for at in cuts if at % shard.cols}
    edges = {row: x.new_zeros(shard.cols) for row in sorted(cut)}
    for b in ops.blocks(shard, x):
        if b.rows.start in edges:
            edges[b.rows.start][b.cols] = ops.read(x, b).view(-1)
    return edges
