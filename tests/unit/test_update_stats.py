"""The sizes of updates and weights against those computed from the weights before and after.

Those of ranks, step by step, are in test_engine_api.py of tests/distributed.
"""

import copy

import pytest
import torch
from torch import nn

from ds_ext.ops import rounding
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.update_stats import UpdateStats, rms
from ds_ext.optimizer.updates import RunUpdate
from tests.common import choose, needs, paths, table
from tests.common.hypers import FOR_ALL, NEEDED, changed
from tests.common.plain import steps

SHAPES = ((), (5,), (13, 29), (4, 3, 5))
BLOCKS = (700, 800)  # in two blocks
FOR_KERNELS = ((48,), (5,), (20, 32), (3, 150))  # of which some have aligned rows
HYPERS = changed(NEEDED, galoreadamw={"rank": 3})
KINDS = [(torch.float32, "stochastic"), (torch.float64, "stochastic")]
KINDS += [
    (half, mode)
    for half in rounding.ROUND
    for mode in ("stochastic", "nearest", "master", "master24")
]
# Native code: how weights are written by each rule, of small shapes. Blocks, and what kernels add
# up, are the same whatever the rule: each rule and each kind once.
QUICK = [(*case, "native", (*SHAPES, BLOCKS)) for case in choose.spread(FOR_ALL, KINDS)]
CASES = [(name, *kind, "native", SHAPES) for name in FOR_ALL for kind in KINDS]
CASES = choose.pairs(CASES) + QUICK
if needs.TRITON:
    of_kernels = choose.spread(("adalomo", "lamb", "flashadamw"), [KINDS[0], *KINDS[2:]])
    CASES += [(*case, "kernels", FOR_KERNELS) for case in of_kernels]
    QUICK += CASES[-len(of_kernels) :][:1]


def make(name, dtype, mode, shapes=SHAPES):
    """Parameters, and an optimizer that measures its updates."""
    params = [nn.Parameter(p) for p in table.weights(shapes, dtype)]
    optimizer = OPTIMIZERS[name](params, **HYPERS[name], weight_update=mode)
    optimizer.update_stats = UpdateStats(1)
    return params, optimizer


def held(optimizer, params):
    """The numbers that weights stand for, with their masters, in fp64."""
    runs = [(p, p.detach().view(-1), Shard.whole(p.shape)) for p in params]
    device = torch.get_default_device()  # those with a master are read to the CPU
    return torch.cat([optimizer.weights(*run).to(device, torch.float64) for run in runs])


@pytest.mark.parametrize("name, dtype, mode, path, shapes", choose.params(CASES, QUICK))
def test_sums_are_those_of_what_was_stored_and_measuring_changes_no_bit(
    name, dtype, mode, path, shapes, monkeypatch
):
    paths.use(monkeypatch, path)
    (params, optimizer), (others, plain) = (make(name, dtype, mode, shapes) for _ in range(2))
    plain.update_stats = None
    expected = torch.zeros(3, dtype=torch.float64)
    for gradients in table.gradients(3, shapes, dtype):
        before = held(optimizer, params)
        steps(optimizer, params, [gradients])
        steps(plain, others, [gradients])
        after = held(optimizer, params)
        squares = [(after - before).square().sum(), after.square().sum()]
        expected += torch.stack([*squares, torch.tensor(len(after))])
    assert all(map(torch.equal, params, others))
    (got,) = optimizer.update_stats.sums()
    assert got.dtype == torch.float64
    error = 1e-10 if dtype == torch.float64 else 5e-4  # half a million squares in a row
    assert got.allclose(expected, rtol=error, atol=0), (got, expected)
    (figures,) = rms(expected[None])
    assert figures["update_rms"] == pytest.approx((expected[0] / expected[2]).item() ** 0.5)
    assert figures["weight_rms"] == pytest.approx((expected[1] / expected[2]).item() ** 0.5)


@pytest.mark.parametrize("path", paths.EACH)
def test_groups_are_measured_apart_replicas_once_and_skipped_steps_not_at_all(path, monkeypatch):
    paths.use(monkeypatch, path)
    a, b, c = (nn.Parameter(torch.full((3, 4), x)) for x in (1.0, 2.0, 3.0))
    optimizer = OPTIMIZERS["lomo"]([{"params": [a]}, {"params": [b], "lr": 0.1}], lr=0.5)
    optimizer.update_stats = UpdateStats(2)
    optimizer.add_param_group({"params": [c]})
    updates = [
        RunUpdate(p, p.detach().view(-1), torch.ones(12), Shard.whole((3, 4)), num_replicas=n)
        for p, n in ((a, 1), (b, 2))
    ]
    optimizer.update(updates, None)
    figures = rms(optimizer.update_stats.sums())
    assert [f["update_rms"] for f in figures] == pytest.approx([0.5, 0.1, 0])
    assert [f["weight_rms"] for f in figures] == pytest.approx([0.5, 1.9, 0])
    sums = optimizer.update_stats.sums()
    assert sums[:, 2].tolist() == [12, 6, 0]
    optimizer.rollback_step([b])
    assert optimizer.update_stats.sums().tolist() == [sums[0].tolist(), [0, 0, 0], [0, 0, 0]]


def test_a_meter_goes_with_a_copy_and_stays_when_a_state_is_loaded():
    params, optimizer = make("adalomo", torch.float32, "nearest", [(3, 4)])
    steps(optimizer, params, table.gradients(1, [(3, 4)], torch.float32))
    twin = copy.deepcopy(optimizer)
    assert twin.update_stats.sums().equal(optimizer.update_stats.sums())
    twin.update_stats.clear()
    assert optimizer.update_stats.sums()[0, 2] == 12
    twin.update_stats = None
    twin.load_state_dict(optimizer.state_dict())
    assert twin.update_stats is None and copy.deepcopy(twin).update_stats is None
    assert optimizer.update_stats.sums()[0, 2] == 12
    twin.update_stats = UpdateStats(len(twin.param_groups))
    twin.step()
    assert twin.update_stats.sums().shape == (1, 3)
