"""Stacks of small matrices, as weights of convolutions are, and long or narrow matrices."""

import pytest
import torch
from torch import nn

from ds_ext import ops
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.executors.triton import launcher, launches
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from tests.common import needs, paths, table

SHAPES = [(8, 5, 3, 3), (6, 4, 1, 1), (3, 2, 7, 7), (4, 6, 5), (2, 3, 1, 4), (2, 1, 16, 16)]


def exact(x, before, share, shard):
    """Sums of squares over rows, columns, and those over columns of what is divided by row."""
    square = torch.zeros(shard.numel, dtype=torch.float64)
    square[shard.start : shard.stop] = x.double().square()
    square = square.view(shard.mats, shard.rows, shard.cols)
    row = square.sum(-1)
    return row, square.sum(-2), (square / (before.double() + share * row).unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_over_rows_and_columns(shape, monkeypatch):
    monkeypatch.setattr("ds_ext.ops.shard.BLOCK", 60)  # several blocks, some of parts of a matrix
    ((whole,),) = table.gradients(1, [shape])
    shard = Shard.whole(shape)
    rows = shard.cols * 3 % shard.numel
    for start, stop in ((0, shard.numel), (rows, shard.numel - shard.cols), (7, 8), (9, 9)):
        run = Shard(shape, start, stop, shard.cols)
        x = whole.view(-1)[start:stop].float()
        before = torch.rand(run.mats, run.rows) + 0.5
        expected = exact(x, before, 0.1 / run.cols, run)
        found = ops.row_col_square_sums(x, run, x)
        if run.holds_rows and start % shard.cols == 0 == stop % shard.cols:
            weighted = ops.weighted_square_sums(x, before / 0.9, 0.0, 0.9, run, x)[2]
            found = *found, weighted
        for a, b in zip(found, expected, strict=False):
            assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_quotient_is_that_of_each_element(shape):
    ((x,),) = table.gradients(1, [shape])
    shard = Shard.whole(shape)
    row, col = (torch.rand(shard.mats, n, dtype=torch.float64) for n in (shard.rows, shard.cols))
    u = ops.Quotient(x.view(-1), row.unsqueeze(2), col.unsqueeze(1), 0.5)
    expected = x.view(shard.mats, shard.rows, shard.cols)
    expected = expected * row.unsqueeze(2) * col.unsqueeze(1) * 0.5
    assert ops.evaluate(u, shard, x).view_as(expected).allclose(expected, rtol=1e-14)


@pytest.mark.parametrize("path", ["ops", "native"])
@pytest.mark.parametrize("shape", [(2**19, 1), (2**19, 2), (1, 2**19), (100_000, 33), (3, 9000, 5)])
def test_long_sums_keep_their_digits(path, shape, monkeypatch):
    """Additions of half a million equal numbers in fp32 would lose 1e-3."""
    paths.use(monkeypatch, path)
    shard = Shard.whole(shape)
    x = torch.full((shard.numel,), 0.3)
    before = torch.full((shard.mats, shard.rows), 0.5)
    found = ops.row_col_square_sums(x, shard, x)
    found += ops.weighted_square_sums(x, before, 0.0, 0.9, shard, x)
    row, col, weighted = exact(x, before * 0.9, 0.1 / shard.cols, shard)
    for a, b in zip(found, (row, col, row, col, weighted), strict=True):
        assert ((a - b).abs() / b).max() <= 1e-5


@needs.triton
@pytest.mark.parametrize("name", ["adalomo", "came", "lamb"])
def test_a_convolution_asks_for_a_few_launches_of_few_parameters(name, monkeypatch):
    """One of 512 x 512 x 3 x 3 took 500,000 rows of a table, which no kernel compiled for."""
    launched = []
    paths.use(monkeypatch, "kernels")
    monkeypatch.setattr(launches, "launch_kernel", lambda one, *_: launched.append(len(one.rows)))
    p = nn.Parameter(torch.ones(64, 64, 3, 3))
    p.grad = torch.ones_like(p)
    OPTIMIZERS[name]([p, nn.Parameter(torch.ones(3, 2))]).step()
    assert sum(launched) <= 8


@needs.triton
def test_a_launch_has_no_more_parameters_than_a_program_looks_through(monkeypatch):
    launched = []
    paths.use(monkeypatch, "kernels")
    monkeypatch.setattr(launches, "launch_kernel", lambda one, *_: launched.append(len(one.rows)))
    count = launcher.MAX_PARAMETERS + 5
    x = Runs([torch.ones(8)] * count)
    batch = TableBatch([Shard.whole((8,))] * count, device=paths.DEVICE)
    ops.apply_(WeightStorage(x), x, batch, lr=0.1)
    assert launched == [launcher.MAX_PARAMETERS, 5]
