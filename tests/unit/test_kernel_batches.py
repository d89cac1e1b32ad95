"""Batches by kernels: a parameter's bits are its own, and the host copies once and reads nothing.

That they step as the ops do is in test_kernels.py. The statistics of runs by kernels.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.host_gpu import Calls
from ds_ext import ops
from ds_ext.ops.block_sizes import WIDEST
from ds_ext.ops.executors.triton import devices, launch_memory, launches, sizes, tiles
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.optimizer.updates import RunUpdate
from tests.common import needs, paths, plain, table
from tests.common.choose import params, spread
from tests.common.hypers import SIMULATED
from tests.common.simulated import cut
from tests.unit import test_kernels
from tests.unit.test_native import BATCHED, optimizers_of

pytestmark = needs.triton
DEVICE, kernels, launched = test_kernels.DEVICE, test_kernels.kernels, test_kernels.launched
# Vectors and matrices, of which some have aligned rows, and rows of two widths of tiles.
SHAPES = ((48,), (5,), (20, 32), (9, 30), (3, 1040))
HALVES = ((20, 32), (9, 30), (5,))  # of which a rank holds a half that cuts rows
WAYS = [(torch.float32, "nearest"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "master")]
MODES = [*WAYS, (torch.float16, "nearest"), (torch.bfloat16, "master24"), (torch.float16, "master")]
CUTS = [(SHAPES, 1), (HALVES, 2)]
CASES = spread(BATCHED, [(way, cut) for way in WAYS for cut in CUTS])
QUICK = [case for case in CASES if case[0] in ("adalomo", "came")]


def updates_of(weights, grads, world):
    """Rank 0's runs of parameters, and of their gradients."""
    made = []
    for p, g in zip(weights, grads, strict=True):
        s = Shard.of_rank(tuple(p.shape), 0, world)
        made.append(RunUpdate(p, p.detach().view(-1)[: len(s)], g.view(-1)[: len(s)], s))
    return made


def stepped(name, way, together, shapes, world, steps=1):
    """Bits of the weights after some steps, of all parameters in one optimizer or each in its."""
    dtype, mode = way
    weights = [nn.Parameter(p) for p in table.weights(shapes, dtype)]
    optimizers = optimizers_of(name, weights, together, **SIMULATED[name], weight_update=mode)
    for grads in table.gradients(steps, shapes, dtype):
        updates = updates_of(weights, grads, world)
        for optimizer, some in zip(optimizers, [updates] if together else updates, strict=True):
            optimizer.update(some if together else [some], lambda total: None)
    return [p.detach() for p in weights], optimizers


@pytest.mark.parametrize("name, way, cut", params(CASES, QUICK))
def test_bits_are_those_of_the_parameter_alone(name, way, cut, monkeypatch):
    paths.use(monkeypatch, "kernels")
    shapes, world = cut
    both, (optimizer,) = stepped(name, way, True, shapes, world)
    alone, _ = stepped(name, way, False, shapes, world)
    (plan,) = optimizer._plans.values()
    # a group of 8-bit moments that a cut goes through is stepped alone
    assert plan.batched if name == "flashadamw" else not plan.alone
    assert all(a.equal(b) for a, b in zip(both, alone, strict=True))
    before = table.weights(shapes, way[0])
    assert sum(a.equal(w) for a, w in zip(both, before, strict=True)) <= 1  # of few elements


@pytest.mark.parametrize("name", BATCHED)
def test_the_host_reads_nothing_and_copies_once_a_batch(name, monkeypatch):
    """Reading a number of ``meta``, which stands for a GPU here, raises an error."""
    copies = []
    paths.use(monkeypatch, "ops")
    monkeypatch.setattr(devices, "DEVICES", {"meta"})
    monkeypatch.setattr(launches, "launch_kernel", lambda *_: None)
    copy_ = launch_memory.DeviceArrays._copy
    monkeypatch.setattr(
        launch_memory.DeviceArrays, "_copy", lambda *args: (copies.append(args), copy_(*args))
    )
    weights = [nn.Parameter(torch.ones(shape, device="meta")) for shape in SHAPES]
    optimizer = OPTIMIZERS[name](weights, **SIMULATED[name])
    for _ in range(3):  # the second step reads cached norms
        copies.clear()
        updates = updates_of(weights, [torch.ones_like(p) for p in weights], 2)
        optimizer.update(updates, lambda total: None)
        optimizer.commit_weight_norms()
    (plan,) = optimizer._plans.values()
    assert len(copies) == len(plan.batches) <= 3


# Launches of a step of matrices of several widths, and vectors; operations of torch, of which three
# allocate memory.
FEW = {"lomo": (1, 3), "adamw": (1, 3), "adalomo": (11, 19), "adafactor": (11, 19)}
FEW |= {"lamb": (4, 15), "came": (13, 12)}


@pytest.mark.parametrize("name", FEW)
def test_a_bucket_takes_few_launches_and_operations_of_torch(name, monkeypatch):
    launched = []
    paths.use(monkeypatch, "ops")
    monkeypatch.setattr(devices, "DEVICES", {"meta"})
    monkeypatch.setattr(launches, "launch_kernel", lambda one, *_: launched.append(one.kind.name))
    shapes = ((4096, 4096), (1024, 11008), (4096,), (32000, 4096))
    weights = [nn.Parameter(torch.ones(s, device="meta", dtype=torch.bfloat16)) for s in shapes]
    optimizer = OPTIMIZERS[name](weights, lr=None if name == "adafactor" else 0.1)
    updates = updates_of(weights, weights, 2)
    for _ in range(3):
        launched.clear()
        with Calls() as calls:
            optimizer.update(updates, lambda total: None)
            optimizer.commit_weight_norms()
    assert (len(launched), calls.made) == FEW[name], launched


def test_runs_of_few_rows_have_low_strips():
    """Two programs for a multiprocessor where rows allow it, by the run's own geometry."""
    shapes = ((4096, 4096), (4096, 11008), (11008, 4096), (32000, 4096), (512, 4096))
    columns = ([0, math.prod(s), 1, *s, 0] for s in shapes)
    at = tiles.by_strip(tiles.Geometry(*map(np.array, zip(*columns, strict=True))))
    heights = [16, 16, 32, 64, 16]
    assert at.of("height").tolist() == heights
    assert at.programs.tolist() == [-(-s[0] // h) for s, h in zip(shapes, heights, strict=True)]
    assert (at.programs[:4] >= 256).all()
    for width, rows, warps in ((2**10, 4, 4), (2**12, 2, 8), (2**14, 1, 8)):
        assert sizes.shape_of("weighted_sums", {"TC": width}) == ({"TR": rows, "TC": width}, warps)


@pytest.mark.parametrize(
    "name, way", params([("adalomo", WAYS[1]), ("adafactor", WAYS[2])], [("adalomo", WAYS[1])])
)
def test_sums_of_squares_of_written_weights_are_known_unless_they_were_edited(
    name, way, monkeypatch
):
    """By an operation of torch, or past its version counters: all weights are read again then."""
    dtype, mode = way
    shapes, stepped = ((40, 160), (300,)), []
    for path in ("kernels", "ops"):
        paths.use(monkeypatch, path)
        launched = []
        start = launches.launch_kernel
        monkeypatch.setattr(
            launches,
            "launch_kernel",
            lambda one, *of, to=launched, by=start: (to.append(one.kind.name), by(one, *of)),
        )
        weights = [nn.Parameter(p) for p in table.weights(shapes, dtype)]
        optimizer = OPTIMIZERS[name](weights, **SIMULATED[name], weight_update=mode)
        reads = []
        for i, grads in enumerate(table.gradients(5, shapes, dtype)):
            launched.clear()
            plain.steps(optimizer, weights, [grads])
            reads.append(" | ".join(launched))
            with torch.no_grad():
                for p in weights:
                    if i == 1:
                        p.mul_(3.0)
                    if i == 3:
                        p.data.mul_(3.0)  # which no counter tells
        monkeypatch.setattr(launches, "launch_kernel", start)
        stepped.append([p.detach().float() for p in weights])
        if path == "kernels":
            assert ["cached_norm" in labels for labels in reads] == [False, True, False, True, True]
    for a, b, w in zip(*stepped, table.weights(shapes, dtype), strict=True):
        assert (a - b).norm() <= 2e-2 * (b - w).norm()


def test_what_kernels_do_not_take_is_stepped_alone(monkeypatch):
    paths.use(monkeypatch, "kernels")
    shapes = ((4, 6), (130, 2, 3), (31, 9, 1, 1), (7,))
    weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = OPTIMIZERS["lomo"](weights)
    grads = [torch.ones_like(p) for p in weights]
    optimizer.update(updates_of(weights, grads, 1), None)
    (plan,) = optimizer._plans.values()
    assert plan.alone == [1, 2] and plan.batched == [0, 3]
    assert all((p == 1 - 1e-3).all() for p in weights)
    optimizer.update_stats = UpdateStats(1)
    optimizer.update(updates_of(weights, grads, 1), None)
    assert optimizer.update_stats.sums()[0, 2] == sum(p.numel() for p in weights)
    assert len(list(optimizer._plans.values())) == 1


MEASURED = [(name, way) for name in ("adalomo", "lamb", "flashadamw") for way in MODES]


@pytest.mark.parametrize("name, way", params(MEASURED, [MEASURED[0], MEASURED[-2]]))
def test_sizes_of_updates_are_measured_as_they_are_written(name, way, monkeypatch):
    dtype, mode = way
    totals = []
    for path in ("kernels", "ops"):
        paths.use(monkeypatch, path)
        weights = [nn.Parameter(p) for p in table.weights(SHAPES, dtype)]
        optimizer = OPTIMIZERS[name](
            [{"params": weights[:2]}, {"params": weights[2:]}],
            **SIMULATED[name],
            weight_update=mode,
        )
        optimizer.update_stats = UpdateStats(2)
        grads = table.gradients(1, SHAPES, dtype)[0]
        updates = updates_of(weights, grads, 1)
        for i in (0, 3):  # whose sums other ranks have too
            updates[i] = updates[i]._replace(num_replicas=2)
        optimizer.update(updates, None)
        totals.append(optimizer.update_stats.sums())
    found, expected = totals
    assert found[:, 2].equal(expected[:, 2])
    assert ((found - expected).abs() <= 2e-3 * expected).all() and (expected > 0).all()


# Statistics of runs.


@pytest.mark.parametrize("shape", [(3, 33, 40), (130, 300), (5, 700)])
def test_statistics_of_a_run(shape, kernels, launched):
    (whole,) = table.gradients(1, [shape])[0]
    for start, stop in ((0, whole.numel()), (17, 1500), (1320, 2640), (7, 8), (9, 9)):
        shard = Shard(shape, start, stop, 1)
        x = cut(whole, shard).to(DEVICE, torch.float32)
        exact = torch.zeros(whole.numel(), dtype=torch.float64)
        exact[start:stop] = x.cpu().double().square()
        exact = exact.view(shard.mats, shard.rows, shard.cols)
        row, col = ops.row_col_square_sums(x, shard, x)
        (total,) = ops.square_sums((x,), shard, x)
        for found, expected in ((row, exact.sum(-1)), (col, exact.sum(-2)), (total, exact.sum())):
            assert (found.cpu() - expected).norm() <= 1e-6 * expected.norm()
    assert set(launched) == {"row_col_sums", "square_sums", "fold"}


@pytest.mark.parametrize("shape", [(3, 33, 40), (130, 300), (50, 700), (42, 1040)])
def test_weighted_statistics_of_whole_rows(shape, kernels, launched, monkeypatch):
    if shape == (130, 300):
        monkeypatch.setattr(sizes, "PROGRAMS", 2)  # strips of 64 rows instead of 16
    (whole,) = table.gradients(1, [shape])[0]
    rows, cols = math.prod(shape[:-1]), shape[-1]
    before = torch.rand(shape[:-1], dtype=torch.float64).view(-1, shape[-2]) + 0.5
    for first, last in ((0, rows), (1, rows - 2), (35, 36), (40, 40)):
        shard = Shard(shape, first * cols, last * cols, cols)
        x = cut(whole, shard).to(DEVICE, torch.float32)
        args = before.to(DEVICE, torch.float32) / 0.9, 0.0, 0.9, shard, x
        found = ops.weighted_square_sums(x, *args)
        exact = torch.zeros(rows, cols, dtype=torch.float64)
        exact[first:last] = x.cpu().double().square().view(-1, cols)
        exact = exact.view(shard.mats, shard.rows, shard.cols)
        row = exact.sum(-1)
        divided = exact / (before + 0.1 / shard.cols * row).unsqueeze(-1)
        for a, b in zip(found, (row, exact.sum(-2), divided.sum(-2)), strict=True):
            assert (a.cpu() - b).norm() <= 1e-6 * b.norm()
    assert set(launched) == {"weighted_sums", "fold"}


@pytest.mark.parametrize("shape", [(3, 33, 40), (130, 300), (42, 1040)])
def test_normalized_whole_rows(shape, kernels, launched):
    (whole,) = table.gradients(1, [shape])[0]
    rows, cols = math.prod(shape[:-1]), shape[-1]
    row, col = (torch.rand(math.prod(shape[:-2]), n) + 0.5 for n in shape[-2:])
    for first, last in ((0, rows), (1, rows - 2), (35, 36), (40, 40)):
        shard = Shard(shape, first * cols, last * cols, cols)
        x = ops.Scaled(cut(whole, shard).to(DEVICE, torch.float32), 0.5, 0.7)
        x = ops.Quotient(x, row.unsqueeze(-1).to(DEVICE), col.unsqueeze(-2).to(DEVICE))
        made = []
        for on in (True, False):
            kernels(on)
            found, sums = ops.normalize_whole_rows(x, 20.0, shard, x.row)
            made.append((found.row.flatten()[first:last], sums))
        for a, b in zip(*made, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()
    assert set(launched) == {"normalize_whole_rows", "fold"}


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(3, 33, 40), (2, 5000, 7), (5, 4100)])
def test_factors(shape, beta, kernels, launched):
    shard = Shard.whole(shape)
    sizes = (shard.rows, shard.cols, shard.rows, shard.cols, shard.cols)
    given = [torch.rand(shard.mats, n, dtype=torch.float64) + 0.1 for n in sizes]
    for n, clip in ((2, math.inf), (3, math.inf), (3, 1e-3)):
        found = [x.to(DEVICE, torch.float32) for x in given]
        expected = [x.clone() for x in given]
        for x in (found, expected):
            x += ops.factors_(*x[:2], tuple(x[2 : 2 + n]), 1e-3, beta, clip, shard)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            assert (a.cpu() - b).norm() <= 1e-6 * b.norm()
    assert launched == ["factors", "clipped_factors", "clipped_factors"]


@pytest.mark.slow
def test_rows_wider_than_a_tile_are_read_twice(kernels, launched):
    (g,) = table.gradients(1, [(5, WIDEST + 16)])[0]
    shard = Shard(tuple(g.shape), g.shape[1], 4 * g.shape[1], g.shape[1])
    before = torch.arange(1.0, 6.0).view(1, 5)
    by_col = torch.rand(1, 1, g.shape[1], generator=torch.Generator().manual_seed(0)) + 0.5
    made = []
    for on, dtype in ((True, torch.float32), (False, torch.float64)):
        kernels(on)
        x = ops.Scaled(cut(g.float(), shard).to(DEVICE, dtype), 0.5, 0.75)
        row, col = before.to(DEVICE, dtype), by_col.to(DEVICE, dtype)
        weighted = ops.weighted_square_sums(x, row, 1e-3, 0.9, shard, x)
        rows = ops.Quotient(x, row.unsqueeze(-1), col)
        rows, sums = ops.normalize_whole_rows(rows, 1e3, shard, x)
        made.append((*weighted, rows.row[:, 1:4], sums))  # of the rows of this rank
    for a, b in zip(*made, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm() and b.norm() > 0
    assert set(launched) == {"row_col_sums", "fold"}
