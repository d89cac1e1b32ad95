"""The low-rank space of a matrix G [rows, cols]: its basis, and the ways into it and back.

The space has ``rank`` dimensions on one side of the matrix. Right: basis V' [rank, cols], whole on
every rank, and G is seen as R = G·V [rows, rank]. Left: basis U [rows, rank], of which a rank
keeps the rows that its run touches, and R = U'·G [rank, cols]. Sides are the whole matrix's.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.ops.shard import Block, Shard, outward
from ds_ext.ops.state import Part
from ds_ext.rules.base import Sums

# Elements of the gradient that all ranks hold at a time while the basis is renewed.
SLICE = 2**20
# Singular values below this part of the largest one are noise in the Gram matrix.
NOISE = 1e-6


def own_part(rank: int, right: bool, shard: Shard, unit: int = 1) -> slice:
    """Elements of R, flat, whose moments a rank keeps, in whole units.

    Right: the rows its run touches, which are what its update is made of; a row on two ranks is
    kept by both. Left: every rank's update is made of all of R, so R is cut as the matrix is.
    """
    if right:
        rows = shard.touched
        return outward(rows.start * rank, rows.stop * rank, unit, shard.rows * rank)
    size = rank * shard.cols

    def cut(at: int) -> int:
        return size if at == shard.numel else size * at // shard.numel // unit * unit

    return slice(cut(shard.start), cut(shard.stop))


def basis_part(rank: int, right: bool, shard: Shard) -> Part:
    """What a rank keeps of a basis: see ``own_basis``."""
    if right:
        return Part.whole(rank, shard.cols)
    rows = shard.touched
    shape = (rows.stop - rows.start, rank)
    return Part(rows.start * rank, rows.stop * rank, shard.rows * rank, shape)


def own_basis(q: Tensor, right: bool, shard: Shard) -> Tensor:
    """What a rank keeps of a basis [side, rank]."""
    return (q.T if right else q[shard.touched]).clone(memory_format=torch.contiguous_format)


def project(g: ops.Gradient, q: Tensor, right: bool, shard: Shard) -> Tensor:
    """R of one run, to be summed over ranks; ``q`` is what the rank keeps of the basis."""
    shape = (shard.rows, q.shape[0]) if right else (q.shape[1], shard.cols)
    r = torch.zeros(shape, dtype=q.dtype, device=q.device)
    first = shard.touched.start
    for b in ops.blocks(shard, g):
        x = ops.read(g, b)[0]
        if right:
            r[b.rows] += x @ q[:, b.cols].T
        else:
            r[:, b.cols] += q[b.rows.start - first : b.rows.stop - first].T @ x
    return r


@dataclass(frozen=True)
class Product:
    """left · right, [rows touched, rank] · [rank, cols]: a run of a matrix projected back."""

    left: Tensor
    right: Tensor
    first: int  # row of the whole matrix that ``left`` starts at

    def block(self, b: Block) -> Tensor:
        """Block ``b`` of the product."""
        rows = slice(b.rows.start - self.first, b.rows.stop - self.first)
        return (self.left[rows] @ self.right[:, b.cols]).unsqueeze(0)


def basis(g: ops.Gradient, rank: int, right: bool, shard: Shard) -> Generator[Sums, Sums, Tensor]:
    """The leading singular vectors of one side of the whole matrix: what this rank keeps of them.

    A run of a flattened matrix has neither whole rows nor whole columns, so the Gram matrix of the
    short side is added up from slices of G of fixed size that the ranks put together; the sums are
    of one number and zeros, so its bits do not depend on the number of ranks. One rank adds it up,
    in fp64 for its condition is the square of G's, and sends the vectors to all: the one whose turn
    it is, so that the matrices of a bucket are spread over the ranks. The long side's are G·w/σ;
    those without a gradient (σ = 0) are left 0, where an SVD would choose at random.
    """
    tall = shard.rows > shard.cols or (shard.rows == shard.cols and right)
    gram = yield from _gram(g, tall, shard)
    w = torch.zeros(
        min(shard.rows, shard.cols), rank, dtype=ops.accumulator(g.dtype), device=g.device
    )
    if gram is not None:
        w.copy_(_leading(gram, rank, divided=right != tall))
    (w,) = yield (w,)
    if right != tall:  # from the short side's vectors to the long side's
        (r,) = yield (project(g, own_basis(w, tall, shard), tall, shard),)
        w = r if tall else r.T
    return own_basis(w, right, shard)


def _gram(g: ops.Gradient, tall: bool, shard: Shard) -> Generator[Sums, Sums, Tensor | None]:
    """The Gram matrix of the short side, [short, short] in fp64, on the rank that adds it up."""
    short, has_turn = min(shard.rows, shard.cols), shard.has_turn
    gram = torch.zeros(short if has_turn else 0, short, dtype=torch.float64, device=g.device)
    for rows, cols in _slices(shard, tall):
        (x,) = yield (_window(g, rows, cols, shard),)
        if has_turn:
            x = x.double()
            gram.addmm_(x.T, x) if tall else gram.addmm_(x, x.T)
    return gram if has_turn else None


def _slices(shard: Shard, tall: bool) -> Iterator[tuple[slice, slice]]:
    """Boxes (rows, cols) of about SLICE elements that cut the long side."""
    rows, cols = slice(0, shard.rows), slice(0, shard.cols)
    long, short = (shard.rows, shard.cols) if tall else (shard.cols, shard.rows)
    size = max(1, SLICE // short)
    for start in range(0, long, size):
        cut = slice(start, min(start + size, long))
        yield (cut, cols) if tall else (rows, cut)


def _window(g: ops.Gradient, rows: slice, cols: slice, shard: Shard) -> Tensor:
    """A box of the matrix, 0 but for the elements of the run ``g``."""
    shape = (rows.stop - rows.start, cols.stop - cols.start)
    window = torch.zeros(shape, dtype=ops.accumulator(g.dtype), device=g.device)
    for b in ops.blocks(shard, g):
        row, col = _common(rows, b.rows), _common(cols, b.cols)
        if row.start < row.stop and col.start < col.stop:
            part = ops.read(g, b)[0][_within(row, b.rows), _within(col, b.cols)]
            window[_within(row, rows), _within(col, cols)] = part
    return window


def _common(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _within(a: slice, outer: slice) -> slice:
    """A slice counted from the start of ``outer``."""
    return slice(a.start - outer.start, a.stop - outer.start)


def _leading(gram: Tensor, rank: int, divided: bool) -> Tensor:
    """The first ``rank`` eigenvectors, [side, rank], divided by their singular values if asked.

    Their largest component is positive, so that the moments of a direction keep their sign when
    the basis is renewed, which an SVD leaves to chance.
    """
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(gram)  # ascending
    values, vectors = values[-rank:].flip(0), vectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = vectors.where(largest >= 0, -vectors)
    if not divided:
        return vectors
    sigma = values.clamp(min=0).sqrt()
    return torch.where(sigma > NOISE * sigma[0], vectors / sigma, 0.0)
