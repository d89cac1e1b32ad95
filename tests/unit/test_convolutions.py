"""Stacks of small matrices, as weights of convolutions are: passes of a few calls for all."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ext import ops
from ds_ext.ops import passes, small_matrices
from ds_ext.ops.batch import Runs, Weights
from ds_ext.ops.executors.table_batch import TableBatch
from ds_ext.ops.executors.triton import launcher, launches
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from tests.common import needs, paths, plain, table

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
    assert passes.evaluate(u, shard, x).view_as(expected).allclose(expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["adalomo", "adafactor", "came"])
def test_the_bits_of_a_stack_are_those_of_its_blocks(name, monkeypatch):
    """Small matrices by the calls for many, and each by those for large ones."""

    paths.use(monkeypatch, "ops")

    def trained(most):
        monkeypatch.setattr(small_matrices, "MOST", most)
        weights, gradients = table.weights(SHAPES), table.gradients(3, SHAPES)
        params, _ = plain.stepped(OPTIMIZERS[name], weights, gradients)
        return torch.cat([p.view(-1) for p in params])

    start = torch.cat([p.view(-1) for p in table.weights(SHAPES)])
    found, expected = trained(16), trained(0)
    assert (found - expected).norm() <= 1e-12 * (expected - start).norm()


class Traffic(TorchDispatchMode):
    """Counts calls of torch, and the elements that these make or write."""

    def __init__(self):
        super().__init__()
        self.calls = self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not is_view:
            self.calls += 1
            tensors = out if isinstance(out, (tuple, list)) else [out]
            self.elements += sum(x.numel() for x in tensors if isinstance(x, torch.Tensor))
        return out


def traffic(name, shape):
    """Calls, and elements written for each of the parameter's, of one step."""
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.ones_like(p)
    optimizer = OPTIMIZERS[name]([p])
    optimizer.step()
    with Traffic() as counted:
        optimizer.step()
    return counted.calls, counted.elements / p.numel()


@pytest.mark.parametrize("name", ["adalomo", "adafactor", "came"])
@pytest.mark.parametrize("size, calls, passes", [(1, 2, 4), (3, 4, 7)])
def test_a_stack_costs_about_what_a_matrix_of_its_size_does(name, size, calls, passes, monkeypatch):
    """Calls by its size alone, and some more passes: statistics are as large as the weight."""
    paths.use(monkeypatch, "ops")
    stack = traffic(name, (512, 128, size, size))
    matrix = traffic(name, (512, 128 * size * size))
    assert stack[0] <= calls * matrix[0]
    assert stack[1] <= passes * matrix[1]


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
    ops.apply_(Weights(x), x, batch, lr=0.1)
    assert launched == [launcher.MAX_PARAMETERS, 5]
