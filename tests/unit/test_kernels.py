"""Kernels are their ops: on a GPU where there is one, else in Triton's interpreter on the CPU.

Batches by kernels: the host copies once and reads nothing. That bits are a parameter's own:
test_native.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.host_gpu import Calls
from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.ops import block_sizes
from ds_ext.ops.executors import table_passes
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.executors.triton import devices, launcher, launches, tiles
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import GradCheck, GradFlags
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.optimizer.updates import RunUpdate
from tests.common import needs, optimizer_ranks, paths, table
from tests.common.choose import params, spread
from tests.common.hypers import BATCHED, FOR_ALL, SIMULATED, changed
from tests.common.spies import noted

pytestmark = needs.triton
DEVICE = paths.DEVICE
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = ((), (5,), (300,), (1, 7), (70, 17), (3, 150), (2, 33, 5))
SETTINGS = changed(SIMULATED, lomo={"lr": 0.5}, galoreadamw={"rank": None})
# Triton's interpreter is slow: each rule on one rank or on three, and all storages by one rule.
# `make test` runs rules that ask for different kernels.
BY_RANKS = spread(FOR_ALL, [(3,), (1,)])
STEPPED = [(*case, "fp32", "nearest") for case in BY_RANKS]
STEPPED += [
    ("lomo", 2, dtype, mode)
    for mode in ("stochastic", "nearest", "master", "master24")
    for dtype in ("bf16", "fp16")
]
STEPPED += [("adalomo", 2, "bf16", "stochastic"), ("adalomo", 2, "fp16", "master24")]
QUICK_STEPPED = {("lomo", "fp32", "nearest"), ("lamb", "fp32", "nearest")}  # on any ranks
QUICK_STEPPED |= {("lomo", "bf16", "stochastic"), ("lomo", "fp16", "nearest")}
QUICK_STEPPED |= {("lomo", "bf16", "master24")}
WITH_MOMENTS = list(
    itertools.product(
        [("flashadamw", None), ("adamw", 32), ("lion", 8), ("lion", 32)],
        [(torch.float32, "nearest"), (torch.bfloat16, "master")],
    )
)
WITH_MOMENTS = [(*rule, way) for rule, way in WITH_MOMENTS]
CLOSE = 1e-5  # of the norm of the update
STEPS = 2


@pytest.fixture
def kernels(monkeypatch):
    """Turns the kernels on and off on this machine's device."""

    def turn(on):
        paths.use(monkeypatch, "kernels" if on else "ops", is_default=False)

    turn(True)
    return turn


@pytest.fixture
def launched(monkeypatch):
    """The passes of all launches."""
    return noted(monkeypatch, launches, "launch_kernel", lambda launch, *_: launch.kind.name)


def trained(name, dtype, mode, world, hypers=None, shapes=SHAPES, wrap=lambda g: g, device=DEVICE):
    """Weights after STEPS steps of ``world`` simulated ranks -> whole, in fp32 if there is more."""
    weights = [p.to(device, dtype) for p in table.weights(shapes)]
    hypers = (hypers or SETTINGS[name]) | {"weight_update": mode}
    ranks = optimizer_ranks.of_rule(name, weights, world, hypers)
    for grads in table.gradients(STEPS, shapes):
        grads = [g.to(device, dtype) for g in grads]
        with torch.no_grad():
            steps = []
            for rank in ranks:
                updates = [u._replace(g=wrap(u.g)) for u in rank.updates(grads)]
                steps.append(rank.optimizer.begin(updates))
            lockstep.simulate([step.generators for step in steps])
            for step in steps:
                step.end()
    held = zip(*(rank.weights for rank in ranks), strict=True)
    return [torch.cat(runs).cpu() for runs in held], [w.cpu() for w in weights]


def worst(found, expected, before):
    """The largest error of a parameter relative to its update, which nearest may round to 0."""
    each = zip(found, expected, before, strict=True)
    each = ((a.double(), b.double(), w.double().view(-1)) for a, b, w in each)
    ratios = [(a - b).norm() / (b - w).norm().clamp(1e-30) for a, b, w in each]
    return float(torch.stack(ratios).max())  # NaN if one is


def updates_of(weights, grads, world):
    """Rank 0's runs of parameters, and of their gradients."""
    made = []
    for p, g in zip(weights, grads, strict=True):
        s = Shard.of_rank(tuple(p.shape), 0, world)
        made.append(RunUpdate(p, p.detach().view(-1)[: len(s)], g.view(-1)[: len(s)], s))
    return made


@pytest.mark.parametrize(
    "name, world, dtype, mode", params(STEPPED, lambda case: (case[0], *case[2:]) in QUICK_STEPPED)
)
def test_a_step_is_that_of_the_ops(name, world, dtype, mode, kernels, launched):
    given = name, DTYPES[dtype], mode, world
    found, before = trained(*given)
    assert {"apply", "apply_and_cache_norm"} & {*launched}
    launched.clear()
    kernels(False)
    expected, _ = trained(*given)
    assert not launched
    if dtype == "fp32" or mode.startswith("master"):  # 8 bits may be rounded to either of two
        assert worst(found, expected, before) <= (1e-3 if mode == "master24" else CLOSE)
        return
    # What lies next to the border of two numbers may go to either.
    apart = [a != b for a, b in zip(found, expected, strict=True)]
    assert sum(int(x.sum()) for x in apart) <= sum(map(len, apart)) / 200
    assert any(not torch.equal(a, w.view(-1)) for a, w in zip(found, before, strict=True))


@pytest.mark.parametrize("name", params(["came", "adafactor"], ["came"]))
def test_a_step_with_an_8_bit_momentum_that_no_kernel_reads_is_that_of_the_ops(
    name, kernels, launched
):
    hypers, shapes = SETTINGS[name] | {"nbits": 8}, ((70, 64), (37, 150), (5,))
    found, before = trained(name, torch.float32, "nearest", 3, hypers, shapes)
    assert {"factors", "apply"} <= {*launched}
    kernels(False)
    expected, _ = trained(name, torch.float32, "nearest", 3, hypers, shapes)
    assert worst(found, expected, before) <= CLOSE


@pytest.mark.parametrize(
    "name, nbits, way", params(WITH_MOMENTS, [WITH_MOMENTS[0], WITH_MOMENTS[5]])
)
def test_moments_and_what_they_make_of_weights_have_the_bits_of_the_ops(
    name, nbits, way, kernels, launched
):
    """Those of 8 bits too, whose codes a last bit would change: no sum is in another order.

    The operations are those of the CPU, for those of a GPU round a product and a sum at once.
    """
    dtype, mode = way
    hypers = SETTINGS[name] | ({"nbits": nbits} if nbits else {})
    # more than a tile, groups of 32 that end in one, rows that no vector fits into
    shapes = ((70, 64), (37, 150), (5,))
    found, before = trained(name, dtype, mode, 1, hypers, shapes)
    assert set(launched) == {"apply"}
    kernels(False)
    expected, _ = trained(name, dtype, mode, 1, hypers, shapes, device=paths.HOST)
    assert all(map(torch.equal, found, expected))
    assert not any(a.equal(w.view(-1)) for a, w in zip(found, before, strict=True))


@pytest.mark.parametrize("name", params(["adalomo", "lamb"], []))
def test_vectors_give_the_same_bits(name, kernels, monkeypatch):
    shapes = ((32, 64), (48,), (3, 8, 16), (20, 30), (5,))

    def note(launch, *_):
        return launch.kind.name.removesuffix("_and_cache_norm"), launch.kind.fields.get("ALIGNED")

    aligned = noted(monkeypatch, launches, "launch_kernel", note)
    found, before = trained(name, torch.bfloat16, "master", 2, shapes=shapes)
    assert {("apply", True), ("apply", False)} <= set(aligned)
    monkeypatch.setattr(tiles, "ALIGNMENT", 2**40)  # which no address is a multiple of
    aligned.clear()
    plain, _ = trained(name, torch.bfloat16, "master", 2, shapes=shapes)
    assert not any(is_aligned for _, is_aligned in aligned)
    if DEVICE.type == "cpu":  # elsewhere sums within a tile are in an order of their own
        assert all(map(torch.equal, found, plain))
    assert worst(found, plain, before) <= CLOSE
    kernels(False)
    expected, _ = trained(name, torch.bfloat16, "master", 2, shapes=shapes)
    assert worst(found, expected, before) <= CLOSE


PRODUCTS = [
    ("galoreadamw", {"rank": 3}, torch.bfloat16, 2),
    ("muon", {}, torch.float32, 2),
    ("apollo", {"rank": 3}, torch.float32, 2),
    ("adamw", {"nbits": 8, "min_8bit_size": 0}, torch.float32, 1),
]


@pytest.mark.parametrize("name, hypers, dtype, world", params(PRODUCTS, PRODUCTS[:2]))
def test_what_no_kernel_reads_is_applied_by_one_in_slices(
    name, hypers, dtype, world, kernels, launched, monkeypatch
):
    if "nbits" in hypers:
        pytest.importorskip("bitsandbytes")
    made, limit = [], 512
    original = table_passes.read

    def read(u, b):
        made.append(original(u, b))
        return made[-1]

    monkeypatch.setattr(table_passes, "read", read)
    monkeypatch.setattr(block_sizes, "product_limit", lambda device: limit)
    shapes, hypers = ((70, 64), (37, 150)), SETTINGS[name] | hypers
    found, before = trained(name, dtype, "stochastic", world, hypers, shapes)
    elements = sum(math.prod(shape) for shape in shapes)
    assert "apply" in launched
    if name not in ("apollo", "muon"):  # whose updates a kernel can read
        assert sum(x.numel() for x in made) == STEPS * elements
        assert max(x.numel() for x in made) <= limit
    kernels(False)
    expected, _ = trained(name, dtype, "stochastic", world, hypers, shapes)
    if dtype == torch.float32:
        assert worst(found, expected, before) <= CLOSE
    else:  # the same noise, but for what lies next to the border of two numbers
        apart = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
        assert apart <= elements / 200


def test_fp64_and_what_no_kernel_reads_are_left_to_the_ops(kernels, launched):
    trained("adalomo", torch.float64, "nearest", 2)
    assert not launched
    params = [torch.nn.Parameter(torch.ones(30, 20, device=DEVICE))]
    params[0].grad = torch.randn(30, 20, device=DEVICE)
    galore = OPTIMIZERS["galoreadamw"](params, rank=3)
    galore.step()
    assert "row_col_sums" not in launched


def test_kernels_round_products_before_they_add_them(kernels, monkeypatch):
    given = noted(monkeypatch, launches, "options", launches.options)
    monkeypatch.setattr(launches, "_compiled", {})
    x = torch.ones(6, device=DEVICE)
    assert ops.square_sum(x, Shard.whole((6,)), x) == 6
    assert [one["enable_fp_fusion"] for one in given] == [False, False]


def test_plain_torch_reads_the_results_of_passes_at_once(kernels):
    v, x = torch.zeros(6, device=DEVICE), torch.ones(6, device=DEVICE)
    batch = TableBatch([Shard.whole((6,))], device=v.device)
    batch.passes.arrays.memory = Memory(v.device)
    ops.lerp_(Runs([v]), Runs([x]), 0.5, batch)
    assert v.sum() == 3


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


@pytest.mark.parametrize("name", params(["adalomo", "sinkgd"], ["adalomo"]))
def test_rows_that_no_program_holds_are_stepped_as_by_the_ops(name, kernels, launched, monkeypatch):
    """On two ranks with whole rows, beside rows that programs hold."""
    monkeypatch.setattr("ds_ext.ops.shard.WIDEST", 100)  # of Shards, made for these shapes alone
    given, shapes = (name, torch.float32, "nearest", 2), ((4, 149), (4, 83))
    found, before = trained(*given, shapes=shapes)
    assert {"row_col_sums", "weighted_sums"} < {*launched}
    kernels(False)
    expected, _ = trained(*given, shapes=shapes)
    assert worst(found, expected, before) <= CLOSE


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
