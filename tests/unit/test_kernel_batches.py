"""Batches by kernels: the host copies once and reads nothing. The statistics of runs by kernels.

That they step as the ops do is in test_kernels.py; that bits are a parameter's own: test_native.py.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.host_gpu import Calls
from ds_ext import ops
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.executors.triton import devices, launcher, launches, tiles
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import GradCheck, GradFlags
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.update_stats import UpdateStats
from tests.common import needs, paths
from tests.unit import test_kernels
from tests.unit.test_native import BATCHED, updates_of

pytestmark = needs.triton
DEVICE, kernels, launched = test_kernels.DEVICE, test_kernels.kernels, test_kernels.launched

# Launches of a step of matrices of several widths and a vector, and operations of torch, of which
# three allocate memory; then those of a step that also judges the gradients.
FEW = {name: ((1, 3), (1, 4)) for name in ("lomo", "adamw", "flashadamw", "lion")}
FEW |= {"adalomo": ((11, 19), (12, 21)), "adafactor": ((11, 19), (12, 21))}
FEW |= {"lamb": ((4, 15), (4, 16)), "came": ((13, 12), (14, 14))}
FEW |= {"scale": ((7, 21), (9, 22)), "sinkgd": ((37, 94), (41, 96))}


@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("name", BATCHED)
def test_a_bucket_takes_few_launches_and_operations_of_torch(name, is_judged, monkeypatch):
    launched = []
    paths.use(monkeypatch, "ops")
    monkeypatch.setattr(devices, "DEVICES", {"meta"})
    monkeypatch.setattr(launches, "launch_kernel", lambda one, *_: launched.append(one.kind.name))
    shapes = ((4096, 4096), (1024, 11008), (4096,), (32000, 4096))
    weights = [nn.Parameter(torch.ones(s, device="meta", dtype=torch.bfloat16)) for s in shapes]
    optimizer = OPTIMIZERS[name](weights)
    updates = updates_of(weights, weights, 2)
    first = optimizer.first_round_checks({u.param: u.shard for u in updates})
    votes = {p: torch.ones((), device="meta") for p in weights if p not in first}
    for _ in range(3):
        launched.clear()
        check = [GradCheck(first, votes, GradFlags())] if is_judged else []
        with Calls() as calls:
            optimizer.update(updates, Alone(), *check)
            optimizer.commit_weight_norms()
    assert (len(launched), calls.made) == FEW[name][is_judged], launched


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
        assert tiles.shape_of("weighted_sums", {"TC": width}) == ({"TR": rows, "TC": width}, warps)


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


@pytest.mark.parametrize("name", ["adalomo", "sinkgd"])
def test_rows_that_no_program_holds_are_stepped_as_by_the_ops(name, kernels, launched, monkeypatch):
    """On two ranks with whole rows, beside rows that programs hold."""
    monkeypatch.setattr("ds_ext.ops.shard.WIDEST", 100)  # of Shards, made for these shapes alone
    given, shapes = (name, torch.float32, "nearest", 2), ((4, 149), (4, 83))
    found, before = test_kernels.trained(*given, shapes=shapes)
    assert {"row_col_sums", "weighted_sums"} < {*launched}
    kernels(False)
    expected, _ = test_kernels.trained(*given, shapes=shapes)
    assert test_kernels.worst(found, expected, before) <= test_kernels.CLOSE


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


def test_a_launch_has_no_more_parameters_than_a_program_looks_through(monkeypatch):
    launched = []
    paths.use(monkeypatch, "kernels")
    monkeypatch.setattr(launches, "launch_kernel", lambda one, *_: launched.append(len(one.rows)))
    count = launcher.MAX_PARAMETERS + 5
    x = Runs([torch.ones(8)] * count)
    batch = TableBatch([Shard.whole((8,))] * count, device=paths.DEVICE)
    ops.apply_(WeightStorage(x), x, batch, lr=0.1)
    assert launched == [launcher.MAX_PARAMETERS, 5]
