"""Sums over rows and columns of runs, and what is computed from them, by each executor."""

import math

import pytest
import torch

from ds_ext import ops
from ds_ext.ops.executors.triton import tiles
from ds_ext.ops.shard import Shard
from tests.common import needs, paths, table
from tests.common.choose import params

# Stacks of small matrices, as weights of convolutions are, and larger matrices.
SMALL = [(6, 4, 1, 1), (3, 2, 7, 7), (4, 6, 5), (2, 3, 1, 4), (2, 1, 16, 16), (8, 5, 3, 3)]
LARGE = [(3, 33, 40), (130, 300), (50, 700), (42, 1040)]
CASES = [(shape, path) for shape in (*SMALL, *LARGE) for path in ("ops", "native")]
# More than a tile or strip of each size, in Triton's interpreter, whose time is that of programs.
FOR_KERNELS = [SMALL[-1], (3, 33, 40), (70, 140), (20, 1040)]
CASES += [(shape, "kernels") for shape in FOR_KERNELS] if needs.TRITON else []
LONG = [(shape, "kernels") for shape in (FOR_KERNELS[0], FOR_KERNELS[-1])]


def runs(shape):
    """All of a parameter, rows, one row, a third, and runs that cut rows, of which one is empty."""
    n, cols = math.prod(shape), shape[-1]
    half = n // cols // 2 * cols
    ends = [(0, n), (cols, n - 2 * cols), (half, half + cols), (n // 3, 2 * n // 3)]
    return [Shard(shape, *pair, cols) for pair in (*ends, (3, n - 5), (7, 8), (9, 9))]


def has_whole_rows(shard):
    return shard.holds_rows and shard.start % shard.cols == 0 == shard.stop % shard.cols


def exact(x, before, share, shard):
    """Sums of squares over rows, columns, and those over columns of what is divided by row."""
    square = torch.zeros(shard.numel, dtype=torch.float64)
    square[shard.start : shard.stop] = x.double().square()
    square = square.view(shard.mats, shard.rows, shard.cols)
    row = square.sum(-1)
    return row, square.sum(-2), (square / (before.double() + share * row).unsqueeze(-1)).sum(-2)


def sums_of(x, before, shard):
    """Sums over the rows and columns of a run, each with the exact one; ``before`` divides rows."""
    row, col, weighted = exact(x, 0.9 * before, 0.1 / shard.cols, shard)
    found, expected = [*ops.row_col_square_sums(x, shard, x)], [row, col]
    if has_whole_rows(shard):
        found += ops.weighted_square_sums(x, before, 0.0, 0.9, shard, x)
        expected += [row, col, weighted]
    return zip(found, expected, strict=True)


@pytest.mark.parametrize("shape, path", params(CASES, lambda case: case not in LONG))
def test_sums_of_a_run(shape, path, monkeypatch):
    """In several blocks, some of parts of a matrix, or in strips of one height or another."""
    paths.use(monkeypatch, path)
    ran = paths.passes(monkeypatch)
    monkeypatch.setattr("ds_ext.ops.shard.BLOCK", max(60, math.prod(shape) // 8))
    if shape == (70, 140):
        monkeypatch.setattr(tiles, "PROGRAMS", 2)
    ((whole,),) = table.gradients(1, [shape])
    for shard in runs(shape):
        x = whole.view(-1)[shard.start : shard.stop].float()
        close = 1e-6 if path != "ops" else 3e-6  # of sums over many blocks
        pairs = [*sums_of(x, torch.rand(shard.mats, shard.rows) + 0.5, shard)]
        for a, b in [*pairs, (*ops.square_sums((x,), shard, x), x.double().square().sum())]:
            assert (a - b).norm() <= close * b.norm()
    assert path == "ops" or {*ran} == {"row_col_sums", "square_sums", "weighted_sums"}


@pytest.mark.parametrize("path", ["ops", "native"])
@pytest.mark.parametrize(
    "shape", [(2**19, 1), (2**19, 2), (1, 2**19), (1, 2**14), (100_000, 33), (3, 9000, 5)]
)
def test_long_sums_keep_their_digits(path, shape, monkeypatch):
    """Additions of half a million equal numbers in fp32 would lose 1e-3."""
    paths.use(monkeypatch, path)
    shard = Shard.whole(shape)
    before = torch.full((shard.mats, shard.rows), 0.5)
    for a, b in sums_of(torch.full((shard.numel,), 0.3), before, shard):
        assert ((a - b).abs() / b).max() <= 1e-5


ROWS = [((5, 7), 3.0), ((2, 33, 40), -0.5), ((3, 700), 3.0), ((3, 1040), -0.5)]
ROWS = [(path, *rows) for path in ("ops", "native", *["kernels"][: needs.TRITON]) for rows in ROWS]


@pytest.mark.parametrize("path, shape, factor", params(ROWS, ROWS[:-2]))
def test_rows_of_a_run_are_normalized(path, shape, factor, monkeypatch):
    """Those of a quotient with a factor; norms below a bound count as the bound."""
    paths.use(monkeypatch, path)
    ran = paths.passes(monkeypatch)
    ((whole,),) = table.gradients(1, [shape])
    for shard in filter(has_whole_rows, runs(shape)):
        row, col = (torch.rand(shard.mats, n) + 0.5 for n in (shard.rows, shard.cols))
        x = whole.view(-1)[shard.start : shard.stop].float()
        values = torch.zeros(shard.numel, dtype=torch.float64)
        values[shard.start : shard.stop] = (0.5 * x.double()).clamp(-0.7, 0.7)
        values = values.view(shard.mats, shard.rows, shard.cols)
        values = factor * values * row.unsqueeze(-1) * col.unsqueeze(-2)
        norms = values.norm(dim=-1, keepdim=True)
        for least in (1e-8, 1e3):
            u = ops.Quotient(ops.Scaled(x, 0.5, 0.7), factor * row.unsqueeze(-1), col.unsqueeze(-2))
            rows, sums = ops.normalize_whole_rows(u, least, shard, x)
            expected = values * shard.cols**0.5 / norms.clamp(min=least)
            own = expected.flatten()[shard.start : shard.stop]
            assert (ops.evaluate(rows, shard, x) - own).norm() <= 1e-6 * own.norm()
            by_row, by_col = ops.row_col_square_sums(rows, shard, x)
            squares = expected.square()
            wanted = squares.sum(-2), squares.sum(-2), squares.sum(-1)
            for a, b in zip((sums, by_col, by_row), wanted, strict=True):
                assert (a.view_as(b) - b).norm() <= 1e-5 * b.norm()
    assert path == "ops" or {"weighted_sums", "row_col_sums"} < {*ran}


@pytest.mark.parametrize("path", paths.EACH[1:])
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(3, 33, 40), (2, 5000, 7), (5, 4100)])
def test_factors(shape, beta, path, monkeypatch):
    paths.use(monkeypatch, path)
    ran = paths.passes(monkeypatch)
    shard = Shard.whole(shape)
    sizes = (shard.rows, shard.cols, shard.rows, shard.cols, shard.cols)
    given = [torch.rand(shard.mats, n, dtype=torch.float64) + 0.1 for n in sizes]
    for n, clip in ((2, math.inf), (3, math.inf), (3, 1e-3)):
        found = [x.float() for x in given]
        expected = [x.clone() for x in given]
        for x in (found, expected):
            x += ops.factors_(*x[:2], tuple(x[2 : 2 + n]), 1e-3, beta, clip, shard)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            assert (a - b).norm() <= 1e-6 * b.norm()
    assert len(ran) == 3
