"""Batches by native passes equal parameters one by one by the torch ops, and their bits are those
of the parameter alone: not of what it is stepped with, of threads, or of the processor's vectors.
"""

import functools
import itertools
import math

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import ops
from ds_ext.ops.executors.native import native_table as native
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY
from tests.common import needs, paths, plain, table
from tests.common.choose import pairs, params, spread
from tests.common.hypers import BATCHED, SIMULATED, changed
from tests.common.states import same
from tests.unit import test_kernels
from tests.unit.test_kernels import trained, updates_of, worst

SHAPES = (
    (),
    (5,),
    (2500,),
    (1, 7),
    (300, 1),
    (40, 150),
    (3, 33, 20),
    (70, 1100),
    (6, 5, 3, 3),
    (31, 9, 1, 1),
    (4, 3, 2, 5),
    (600, 400),  # more than a strip
)
SETTINGS = changed(SIMULATED, lomo={"lr": 0.5})
EIGHT = ("flashadamw", "lion")
WITHOUT_SUMS = ("lomo", "adamw", *EIGHT)  # whose bits no order of additions changes
WAYS = [(torch.float32, "nearest"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "nearest")]
WAYS += [(torch.bfloat16, "master"), (torch.float16, "stochastic"), (torch.float16, "nearest")]
WAYS += [(torch.float16, "master"), (torch.bfloat16, "master24"), (torch.float16, "master24")]
ALONE_SHAPES = ((40, 150), (150, 40), (70, 1100), (600, 400))
QUICK = [(*case, 3) for case in spread(REGISTRY, [(way,) for way in WAYS])]
CASES = pairs(
    itertools.product(REGISTRY, WAYS, [3, 1]), lambda case: (case[0], *case[1], case[2]), QUICK
)


def test_the_rules_of_the_table_are_batched():
    expected = {"lomo", "adalomo", "adafactor", "came", "lamb", "adamw", "scale", "sinkgd", *EIGHT}
    assert set(BATCHED) == expected


@pytest.mark.parametrize("name, way, world", params(CASES, QUICK))
def test_equals_the_torch_ops(name, way, world, monkeypatch):
    dtype, mode = way
    found, made, passes = [], [], paths.passes(monkeypatch)
    for path in ("native", "ops"):
        paths.use(monkeypatch, path)
        shapes = SHAPES if name in BATCHED else ALONE_SHAPES
        weights, before = trained(name, dtype, mode, world, SETTINGS[name], shapes)
        found.append(weights)
        made.append(len(passes))
    assert made[0] == made[1] > 0  # the ops make none
    if name in WITHOUT_SUMS:
        assert all(map(torch.equal, *found))
        return
    # What is rounded to 16 bits falls on the other side of a middle for sums in another order.
    is_wide = dtype == torch.float32 or mode == "master"
    most = 2e-5 if is_wide else (2e-4 if mode == "master24" else 3e-2)
    assert worst(*found, before) <= most


BOUNDED = [(name, "native") for name in BATCHED]
BOUNDED += [("lamb", "kernels"), ("adalomo", "kernels")] if needs.TRITON else []


@pytest.mark.parametrize("name, path", params(BOUNDED, lambda case: case != ("adalomo", "kernels")))
def test_gradients_are_averaged_and_bounded(name, path, monkeypatch):
    """By a number of the host, and without decay by one of the device."""
    hypers, shapes, factor = SETTINGS[name], SHAPES, 0.25
    if path == "kernels":
        hypers, shapes = hypers | {"weight_decay": 0.0}, test_kernels.SHAPES
        factor = torch.tensor(factor, device=paths.DEVICE)
    given = name, torch.float32, "nearest", 2, hypers, shapes
    found = []
    for executor in (path, "ops"):
        paths.use(monkeypatch, executor)
        found.append(trained(*given, wrap=lambda g: ops.Scaled(g, factor, 0.3))[0])
    plain, before = trained(*given)
    close = 2e-5 if path == "native" else 1e-5
    assert worst(*found, before) <= close and worst(found[0], plain, before) > 100 * close


def stepped(name, way, together, shapes=SHAPES, world=1, steps=2):
    """Weights after some steps, of all parameters in one optimizer or each in its; optimizers."""
    dtype, mode = way
    weights = [nn.Parameter(p) for p in table.weights(shapes, dtype)]
    make = functools.partial(OPTIMIZERS[name], **SETTINGS[name], weight_update=mode)
    optimizers = [make(weights)] if together else [make([p]) for p in weights]
    for i, optimizer in enumerate([] if together else optimizers):
        optimizer.number_of[weights[i]] = i  # which random bits depend on
    for grads in table.gradients(steps, shapes, dtype):
        updates = updates_of(weights, grads, world)
        for optimizer, some in zip(optimizers, [updates] if together else updates, strict=True):
            optimizer.update(some if together else [some], Alone())
    return [p.detach() for p in weights], optimizers


# For kernels: vectors and matrices, of which some have aligned rows, and rows of two widths of
# tiles; and matrices of which a rank holds a half that cuts rows.
CUTS = [(((48,), (5,), (20, 32), (9, 30), (3, 1040)), 1), (((20, 32), (9, 30), (5,)), 2)]
BITS = [(name, way, "native", SHAPES[1:], 1) for name in BATCHED for way in WAYS[:2]]
if needs.TRITON:
    ways = [(way, "kernels", *cut) for way in (*WAYS[:2], WAYS[3]) for cut in CUTS]
    BITS += spread(BATCHED, ways)
QUICK_BITS = [case for case in BITS if case[2] == "native" or case[0] in ("adalomo", "came")]


@pytest.mark.parametrize("name, way, path, shapes, world", params(BITS, QUICK_BITS))
def test_bits_are_those_of_the_parameter_alone(name, way, path, shapes, world, monkeypatch):
    paths.use(monkeypatch, path)
    steps = 2 if path == "native" else 1
    both, (optimizer,) = stepped(name, way, True, shapes, world, steps)
    alone, _ = stepped(name, way, False, shapes, world, steps)
    (plan,) = optimizer._plans.values()
    # a group of 8-bit moments that a cut goes through is stepped alone
    assert plan.batched if name == "flashadamw" else not plan.alone
    assert same(both, alone)
    before = table.weights(shapes, way[0])
    assert sum(map(torch.equal, both, before)) <= 1  # of few elements


@pytest.mark.parametrize("name, dtype, mode", spread(BATCHED, [WAYS[0], WAYS[1], WAYS[4]]))
def test_bits_depend_neither_on_threads_nor_on_the_processor(name, dtype, mode, monkeypatch):
    paths.use(monkeypatch, "native")
    expected, _ = stepped(name, (dtype, mode), True)
    for number in (1, 2, 5):
        with paths.threads(number):
            assert same(stepped(name, (dtype, mode), True)[0], expected)
    monkeypatch.setattr(native, "INSTRUCTIONS", 1)  # those that every processor has
    assert same(stepped(name, (dtype, mode), True)[0], expected)


# By kernels: runs whose start is not aligned, or lies inside a tile.
NUMBERS = [(*way, "native", 0) for way in WAYS]
if needs.TRITON:
    for start, dtype in ((5, torch.bfloat16), (48, torch.float16)):
        NUMBERS += [(dtype, mode, "kernels", start) for mode in ("stochastic", "master24")]


@pytest.mark.parametrize("dtype, mode, path, start", NUMBERS)
def test_every_number_is_written_as_the_ops_write_it(dtype, mode, path, start, monkeypatch):
    """Bit for bit: of all exponents, subnormal ones, those beyond 16 bits, inf and NaN.

    The second step also reads what the first has written.
    """
    n = 300_000 if path == "native" else 40_000
    bits = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0))
    new = bits.to(torch.int32).view(torch.float32)
    new[:4] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    if path == "kernels" and dtype == torch.bfloat16:  # the interpreter has no subnormal ones
        new[new.abs() < 2**-115] = 0.0
    g = -new.to(paths.DEVICE if path == "kernels" else paths.HOST)
    shard, found, ran = Shard((2 * n,), start, start + n, n), [], paths.passes(monkeypatch)
    for executor in (path, "ops"):
        paths.use(monkeypatch, executor)
        p = nn.Parameter(torch.zeros(2 * n, dtype=dtype, device=g.device))
        optimizer = ds_ext.LOMO([p], lr=1.0, weight_update=mode)
        run, made = p.detach()[start : start + n], []
        for factor in (1.0, 2.0**-10):
            with torch.no_grad():
                optimizer.update([RunUpdate(p, run, g * factor, shard)], None)
            state = optimizer.state[p]
            made += [run.clone(), *(state[key].clone() for key in ("master",) if key in state)]
        found.append(made)
    assert ran == ["apply"] * 2
    for a, b in zip(*found, strict=True):
        nan = a.isnan()
        assert nan.equal(b.isnan()) and a[~nan].equal(b[~nan])
    assert found[0][0].isnan().sum() == new.isnan().sum()


EXPERTS = list(
    itertools.product(["adalomo", "came", "lamb"], [WAYS[0], WAYS[1], WAYS[3], WAYS[7]], ["native"])
)
BY_KERNELS = [(name, WAYS[0], "kernels") for name in ("adalomo", "came", "lamb")]
if needs.TRITON:
    EXPERTS += [("galoreadamw", WAYS[1], "kernels"), *BY_KERNELS]  # GaLore's are stepped alone


@pytest.mark.parametrize("name, way, path", params(EXPERTS, lambda case: case not in BY_KERNELS))
def test_experts_are_stepped_as_the_ops_do(name, way, path, monkeypatch):
    shapes, (dtype, mode) = ((3, 6, 40), (5, 8), (2, 7, 600)), way
    found = []
    for executor in (path, "ops"):
        paths.use(monkeypatch, executor)
        weights = [nn.Parameter(p) for p in table.weights(shapes, dtype)]
        optimizer = OPTIMIZERS[name](weights, **SETTINGS[name], weight_update=mode)
        optimizer.stacks = {weights[0]: 4, weights[2]: 0}
        plain.steps(optimizer, weights, table.gradients(3, shapes, dtype))
        held = [optimizer.weights(p, p.detach().view(-1), Shard.whole(p.shape)) for p in weights]
        found.append(held)
        assert list(optimizer.state[weights[0]]["experts"]) == ["4", "5", "6"]
        assert ("master" in optimizer.state[weights[0]]) == (mode in ("master", "master24"))
        assert "master" not in optimizer.state[weights[0]]["experts"]["4"]
    before = table.weights(shapes, dtype)
    assert worst(*found, before) <= {"stochastic": 3e-2, "master24": 2e-4}.get(mode, 2e-5)


EDITED = [(name, "native") for name in ("adalomo", "adafactor", "lamb")]
EDITED += [("adalomo", "kernels")] if needs.TRITON else []


@pytest.mark.parametrize("how", ["op", "data", "other"])
@pytest.mark.parametrize("name, path", EDITED)
def test_weights_that_were_edited_are_measured_anew(name, path, how, monkeypatch):
    """By an operation, past torch's version counters, or by another optimizer.

    That norms are known otherwise: test_nonfinite.py counts the bytes that are read.
    """
    found, shape = [], (30, 70)
    for executor in (path, "ops"):
        paths.use(monkeypatch, executor)
        (p,) = weights = [nn.Parameter(w) for w in table.weights((shape,), torch.float32)]
        optimizer, other = (OPTIMIZERS[name](weights) for _ in range(2))
        for i, (g,) in enumerate(table.gradients(4, (shape,), torch.float32)):
            p.grad = g
            optimizer.step()
            with torch.no_grad():
                if how == "op":
                    p[i] = 3.0
                elif how == "data":
                    p.data.mul_(1.5)
                else:
                    other.step()
        found.append([p.detach().view(-1)])
    assert worst(*found, table.weights((shape,), torch.float32)) <= 2e-5


def test_a_plan_is_of_the_geometry_that_it_was_made_for(monkeypatch):
    """Also where shards are made anew at each step, in memory that others have left."""
    paths.use(monkeypatch, "native")
    p = nn.Parameter(torch.zeros(60))
    optimizer = ds_ext.LOMO([p], lr=1.0)
    for n in (60, 30, 60, 20):
        shard = Shard((60,), 0, n, n)
        with torch.no_grad():
            optimizer.update([RunUpdate(p, p.detach()[:n], torch.ones(n), shard)], None)
        del shard
    assert p.tolist() == [-4.0] * 20 + [-3.0] * 10 + [-2.0] * 30


def test_autograd_sees_that_weights_were_written(monkeypatch):
    paths.use(monkeypatch, "native")
    p = nn.Parameter(torch.ones(4, 3))
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    ds_ext.AdaLomo([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_that_is_not_finite_shows_in_every_sum(monkeypatch):
    paths.use(monkeypatch, "native")
    for odd in (math.inf, -math.inf, math.nan):
        x = torch.ones(70, 1100)
        x[3, 5] = odd
        batch = TableBatch([Shard.whole((70, 1100))])
        runs = ops.Runs([x.view(-1)])
        row, col = ops.row_col_square_sums(runs, batch, x)
        assert not ops.square_sums((runs,), batch, x)[0].isfinite()
        assert row.isfinite().logical_not().nonzero().tolist() == [[3]]
        assert col.isfinite().logical_not().nonzero().tolist() == [[5]]
