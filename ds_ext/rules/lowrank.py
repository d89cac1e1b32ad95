"""The low-rank space of a matrix G [rows, cols]: its basis, and projections into it and back.

The space has ``rank`` dimensions on one side of the whole matrix. Right: the basis V' [rank, cols]
is replicated on all ranks, and R = G·V [rows, rank]. Left: each rank keeps the rows of the basis
U [rows, rank] that its run touches, and R = U'·G [rank, cols].
"""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.ops import joint
from ds_ext.ops.shard import Block, Shard, outward
from ds_ext.ops.state import Part
from ds_ext.rules.base import Sums

# Elements of the whole gradient that all ranks share at a time while the basis is renewed.
SLICE = 2**20
# Singular values below this fraction of the largest are noise in the Gram matrix.
NOISE = 1e-6


def own_part(rank: int, right: bool, shard: Shard, unit: int = 1) -> slice:
    """Returns the elements of flattened R whose moments a rank keeps, in whole units.

    Right: the rows that the run touches, because the update needs only these. If a row is on two
    ranks, both keep it. Left: every update needs all of R, so R is cut in the matrix's proportions.
    """
    if right:
        rows = shard.touched
        return outward(rows.start * rank, rows.stop * rank, unit, shard.rows * rank)
    size = rank * shard.cols

    def cut(at: int) -> int:
        return size if at == shard.numel else size * at // shard.numel // unit * unit

    return slice(cut(shard.start), cut(shard.stop))


def basis_part(rank: int, right: bool, shard: Shard) -> Part:
    """Declares a rank's part of a basis: see ``own_basis``."""
    if right:
        return Part.whole(rank, shard.cols)
    rows = shard.touched
    shape = (rows.stop - rows.start, rank)
    return Part(rows.start * rank, rows.stop * rank, shard.rows * rank, shape)


def own_basis(q: Tensor, right: bool, shard: Shard) -> Tensor:
    """Returns a rank's part of a basis [side, rank]."""
    return (q.T if right else q[shard.touched]).clone(memory_format=torch.contiguous_format)


def project(
    g: ops.Gradient, q: Tensor, right: bool, shard: Shard, terms: int = 3
) -> Generator[Sums, Sums, Tensor]:
    """Returns a run's share of R, to be summed over ranks.

    ``q`` is its part of the basis, used with ``terms`` bf16 terms.
    """
    shape = (shard.rows, q.shape[0]) if right else (q.shape[1], shard.cols)
    return joint.summed(g, q, shard, shape, _by_right if right else _by_left, terms)


def _by_right(shard: Shard, b: Block, x: Tensor, q: Tensor) -> ops.PlacedProduct:
    return (b.rows, slice(None)), x, q[..., b.cols].mT


def _by_left(shard: Shard, b: Block, x: Tensor, q: Tensor) -> ops.PlacedProduct:
    return (slice(None), b.cols), q[:, _within(b.rows, shard.touched)].mT, x


def basis(g: ops.Gradient, rank: int, right: bool, shard: Shard) -> Generator[Sums, Sums, Tensor]:
    """Returns this rank's part of the leading singular vectors of one side of the whole matrix.

    A run of a flattened matrix may have neither whole rows nor whole columns. The ranks therefore
    assemble slices of G of fixed size, each a sum of one number and zeros, so that bits do not
    depend on the number of ranks. From the slices one rank computes the short side's Gram matrix,
    in fp64 because its condition number is the square of G's, and sends the vectors to all ranks.
    Ranks take turns, so that the matrices of a bucket are spread over them. The long side's vectors
    are G·w/σ. Vectors with σ = 0 stay 0, where an SVD would choose them arbitrarily.
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
        r = yield from project(g, own_basis(w, tall, shard), tall, shard)
        (r,) = yield (r,)
        w = r if tall else r.T
    return own_basis(w, right, shard)


def _gram(g: ops.Gradient, tall: bool, shard: Shard) -> Generator[Sums, Sums, Tensor | None]:
    """The short side's Gram matrix, [short, short] in fp64, on the rank that computes it."""
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
    """A box of the matrix: the elements of the run ``g``, and 0 elsewhere."""
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
    """A slice relative to the start of ``outer``."""
    return slice(a.start - outer.start, a.stop - outer.start)


def _leading(gram: Tensor, rank: int, divided: bool) -> Tensor:
    """The leading ``rank`` eigenvectors, [side, rank]; if ``divided``, by their singular values.

    The largest component of each vector is positive. The moments of a direction therefore keep
    their sign when the basis is renewed, while the signs of an SVD are arbitrary.
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
