"""Kernels are their ops: on a GPU where there is one, else in Triton's interpreter on the CPU."""

import itertools
import math

import pytest
import torch

from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.ops import block_sizes, rounding, sixteen_bit
from ds_ext.ops.executors import table_passes
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.executors.triton import launches, sizes
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.ops.sixteen_bit import RoundingConfig
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.updates import RunUpdate
from tests.common import needs, paths, table
from tests.common.choose import params, spread
from tests.common.hypers import FOR_ALL, SIMULATED, changed
from tests.common.simulated import cut

pytestmark = needs.triton
DEVICE = paths.DEVICE
SHAPES = ((), (5,), (300,), (1, 7), (7, 1), (40, 150), (3, 33, 20), (70, 17))
SETTINGS = changed(SIMULATED, lomo={"lr": 0.5}, galoreadamw={"rank": None})
# Triton's interpreter is slow: each rule on one rank or on three, and all storages by one rule.
# `make test` runs rules that ask for different kernels.
BY_RANKS = spread(FOR_ALL, [(3,), (1,)])
QUICK_BY_RANKS = [("lomo", 3), ("lamb", 3)]
IN_16_BITS = list(
    itertools.product(["lomo"], ["stochastic", "nearest", "master", "master24"], ["bf16", "fp16"])
)
QUICK_IN_16_BITS = [IN_16_BITS[0], ("lomo", "nearest", "fp16"), ("lomo", "master24", "bf16")]
IN_16_BITS += [("adalomo", "stochastic", "bf16"), ("adalomo", "master24", "fp16")]
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
    names = []
    original = launches.launch_kernel

    def start(launch, *args):
        names.append(launch.kind.name)
        original(launch, *args)

    monkeypatch.setattr(launches, "launch_kernel", start)
    return names


def trained(name, dtype, mode, world, hypers=None, shapes=SHAPES, wrap=lambda g: g, device=DEVICE):
    """Weights after STEPS steps of ``world`` simulated ranks -> whole, in fp32 if there is more."""
    weights = [p.to(device, dtype) for p in table.weights(shapes)]
    ranks = []
    for rank in range(world):
        params = [torch.nn.Parameter(p.clone()) for p in weights]
        optimizer = OPTIMIZERS[name](params, **(hypers or SETTINGS[name]), weight_update=mode)
        shards = [Shard.of_rank(tuple(p.shape), rank, world) for p in params]
        runs = [cut(p, s) for p, s in zip(params, shards, strict=True)]
        ranks.append((params, optimizer, shards, runs))
    for grads in table.gradients(STEPS, shapes):
        grads = [g.to(device, dtype) for g in grads]
        with torch.no_grad():
            steps = [
                optimizer.begin(
                    [
                        RunUpdate(p, run, wrap(cut(g, s)), s)
                        for p, run, g, s in zip(params, runs, grads, shards, strict=True)
                    ]
                )
                for params, optimizer, shards, runs in ranks
            ]
            lockstep.simulate([step.generators for step in steps])
            for step in steps:
                step.end()
    held = [
        [optimizer.weights(*of) for of in zip(params, runs, shards, strict=True)]
        for params, optimizer, shards, runs in ranks
    ]
    return [torch.cat(runs).cpu() for runs in zip(*held, strict=True)], [w.cpu() for w in weights]


def worst(found, expected, before):
    """The largest error of a parameter relative to its update, which nearest may round to 0."""
    each = zip(found, expected, before, strict=True)
    each = ((a.double(), b.double(), w.double().view(-1)) for a, b, w in each)
    return max(float((a - b).norm() / (b - w).norm().clamp(1e-30)) for a, b, w in each)


@pytest.mark.parametrize("name, world", params(BY_RANKS, QUICK_BY_RANKS))
def test_a_step_is_that_of_the_ops(name, world, kernels, launched):
    found, before = trained(name, torch.float32, "nearest", world)
    assert {"apply", "apply_and_cache_norm"} & {*launched}
    launched.clear()
    kernels(False)
    expected, _ = trained(name, torch.float32, "nearest", world)
    assert not launched
    assert worst(found, expected, before) <= CLOSE


@pytest.mark.parametrize("name", ["came", "adafactor"])
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


@pytest.mark.parametrize("name, mode, dtype", params(IN_16_BITS, QUICK_IN_16_BITS))
def test_16_bits(name, mode, dtype, kernels):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    found, before = trained(name, dtype, mode, 2)
    kernels(False)
    expected, _ = trained(name, dtype, mode, 2)
    if mode.startswith("master"):  # 8 bits may be rounded to either of two
        assert worst(found, expected, before) <= (CLOSE if mode == "master" else 1e-3)
        return
    # What lies next to the border of two numbers may go to either.
    apart = [a != b for a, b in zip(found, expected, strict=True)]
    assert sum(int(x.sum()) for x in apart) <= sum(map(len, apart)) / 200
    assert any(not torch.equal(a, w.view(-1)) for a, w in zip(found, before, strict=True))


# Unaligned; aligned, with a chunk's end inside a tile.
@pytest.mark.parametrize("dtype, start", [(torch.bfloat16, 5), (torch.float16, 48)])
def test_noise_and_what_is_not_finite_are_those_of_precision(dtype, start, kernels):
    generator = torch.Generator().manual_seed(0)
    most = torch.finfo(dtype).max
    odd = torch.tensor([math.inf, -math.inf, math.nan, most, -most, 0.0, -0.0, 1e-7, 3e-8])
    new = torch.randn(70_007, generator=generator)  # with ``odd``, a multiple of 16 elements
    new = torch.cat([new, odd]).to(DEVICE)
    shard = Shard((2 * len(new),), start, start + len(new), len(new))
    for step in (1, 2):
        run = torch.zeros(len(new), dtype=dtype, device=DEVICE)
        w = sixteen_bit.weight(run, {"step": step}, RoundingConfig("stochastic"), 3, shard)
        ops.apply_(w, -new, shard, lr=1)
        expected = rounding.ROUND[dtype](new.clone(), w.key, shard.start).to(dtype)
        assert torch.equal(run.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert not torch.equal(run, new.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_8_bits_beside_a_weight_are_those_of_the_ops(dtype, kernels, launched):
    """Bit for bit, of all exponents: as they are written, and as they are read again."""
    bits = torch.randint(-(2**31), 2**31, (40_000,), generator=torch.Generator().manual_seed(0))
    new = bits.to(torch.int32).view(torch.float32)
    if dtype == torch.bfloat16:  # Triton's interpreter does not know its subnormal numbers
        new[new.abs() < 2**-115] = 0.0
    new = new.to(DEVICE)
    shard, found = Shard.whole((len(new),)), []
    for on in (True, False):
        kernels(on)
        run, s = torch.zeros(len(new), dtype=dtype, device=DEVICE), {"step": 1}
        w = sixteen_bit.weight(run, s, RoundingConfig("master24"), 0, shard)
        ops.apply_(w, -new, shard, lr=1)
        written = run.clone(), s["master"].clone()
        ops.apply_(w, -new / 1024, shard, lr=1)
        found.append([*written, run, s["master"]])
    assert "apply" in launched
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert found[0][1].unique().numel() == 255 and not found[0][0].equal(found[0][2])


@pytest.mark.parametrize("name", params(["adalomo", "lamb"], []))
def test_vectors_give_the_same_bits(name, kernels, monkeypatch):
    shapes = ((32, 64), (48,), (3, 8, 16), (20, 30), (5,))
    aligned = []
    original = launches.launch_kernel

    def noted(launch, *args):
        name = launch.kind.name.removesuffix("_and_cache_norm")
        aligned.append((name, launch.kind.fields.get("ALIGNED")))
        original(launch, *args)

    monkeypatch.setattr(launches, "launch_kernel", noted)
    found, before = trained(name, torch.bfloat16, "master", 2, shapes=shapes)
    assert {("apply", True), ("apply", False)} <= set(aligned)
    monkeypatch.setattr(sizes, "ALIGNMENT", 2**40)  # which no address is a multiple of
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
    if name != "apollo":  # whose update a kernel can read
        assert sum(x.numel() for x in made) == STEPS * elements
        assert max(x.numel() for x in made) <= limit
    kernels(False)
    expected, _ = trained(name, dtype, "stochastic", world, hypers, shapes)
    if dtype == torch.float32:
        assert worst(found, expected, before) <= CLOSE
    else:  # the same noise, but for what lies next to the border of two numbers
        apart = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
        assert apart <= elements / 200


def test_noise_of_experts_stepped_alone_is_that_of_the_ops(kernels):
    g = torch.randn(4, 20, 30, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    made = []
    for on in (True, False):
        kernels(on)
        p = torch.nn.Parameter(torch.ones(4, 20, 30, device=DEVICE, dtype=torch.bfloat16))
        optimizer = OPTIMIZERS["galoreadamw"]([p], rank=3, lr=0.01)
        optimizer.stacks = {p: 4}
        p.grad = g.bfloat16()
        optimizer.step()
        made.append(p.detach())
    assert (made[0] != made[1]).sum() <= p.numel() / 200 and not (made[0] == 1).all()


def test_fp64_and_what_no_kernel_reads_are_left_to_the_ops(kernels, launched):
    trained("adalomo", torch.float64, "nearest", 2)
    assert not launched
    params = [torch.nn.Parameter(torch.ones(30, 20, device=DEVICE))]
    params[0].grad = torch.randn(30, 20, device=DEVICE)
    galore = OPTIMIZERS["galoreadamw"](params, rank=3)
    galore.step()
    assert "row_col_sums" not in launched


def test_kernels_round_products_before_they_add_them(kernels, monkeypatch):
    given = []
    original = launches.options

    def options(warps):
        given.append(original(warps))
        return given[-1]

    monkeypatch.setattr(launches, "options", options)
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
