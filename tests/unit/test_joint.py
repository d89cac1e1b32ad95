"""Joint operations: matrices that are stepped together get the weights of each stepped alone.
Products with fp32 sums are those in fp64, up to the rounding of their operands."""

import itertools
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.host_gpu import Calls
from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.ops import block_sizes, joint, products
from ds_ext.ops.executors.table_passes import TablePasses
from ds_ext.ops.expressions import Scaled
from ds_ext.ops.joint import Joint
from ds_ext.ops.products import Product, add_product_, product
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import lowrank
from tests.common import paths, table
from tests.common.choose import paired
from tests.common.plain import steps
from tests.common.simulated import errors, ranks_after
from tests.common.spies import noted

CPU = torch.device("cpu")
MATRICES, STEPS = 5, 3
SETTINGS = {
    "muon": {"lr": 0.02},
    "muon in fp32": {"lr": 0.02, "ns_dtype": "fp32"},
    "normuon": {"lr": 0.02, "beta2": 0.95},
    "muon in 8 bits": {"lr": 0.02, "nbits": 8},
    "apollo": {"lr": 0.02, "rank": 4, "scale": 8.0},
    "apollo by tensor": {"lr": 0.02, "rank": 4, "scale_type": "tensor"},
    "galoreadamw": {"lr": 0.02, "rank": 4},
    "galoreadamw in 8 bits": {"lr": 0.02, "rank": 4, "nbits": 8, "min_8bit_size": 0},
}


def rule_of(setting):
    name = "muon" if "muon" in setting else setting.partition(" ")[0]
    return OPTIMIZERS[name].hypers(**SETTINGS[setting])


# Torch's batched products may add up odd sizes in another order, as they do at other addresses.
BUCKETS = itertools.product([((32, 48), 0), ((48, 32), 0), ((13, 29), 5e-6)], [1, 2, 3])


@pytest.mark.parametrize("setting, matrices, world", paired(SETTINGS, BUCKETS))
def test_a_bucket_of_equal_matrices_gets_the_weights_of_each_alone(setting, matrices, world):
    shape, bound = matrices
    shapes = [shape] * MATRICES
    before = table.weights(shapes, torch.float32)
    steps = table.gradients(STEPS, shapes, torch.float32)
    bucket = ranks_after(rule_of(setting), before, steps, world)
    alone = [
        ranks_after(rule_of(setting), [p], [[grads[i]] for grads in steps], world)
        for i, p in enumerate(before)
    ]
    expected = [ranks.params[0] for ranks in alone]
    assert max(errors(bucket.params, expected, before)) <= bound


def calls_of(name, shape, matrices):
    """The operations of torch in a step of equal matrices in one process."""
    params = [nn.Parameter(torch.randn(shape)) for _ in range(matrices)]
    optimizer = OPTIMIZERS[name](params, lr=1e-3)
    for p in params:
        p.grad = torch.randn(shape)
    optimizer.step()
    with Calls() as calls:
        optimizer.step()
    return calls.made


def step_in_16_bits(name, weight_update, monkeypatch, is_joined):
    """Weights and masters after steps of matrices of two shapes, and a step's native passes."""
    shapes = [(32, 48)] * MATRICES + [(48, 32)]
    params = [nn.Parameter(p) for p in table.weights(shapes, torch.bfloat16)]
    optimizer = OPTIMIZERS[name](params, lr=0.02, weight_update=weight_update, weight_decay=0.1)
    with monkeypatch.context() as patch:
        if not is_joined:
            patch.setattr(TablePasses, "joins", lambda *of: False)
        passes = paths.passes(patch)
        for grads in table.gradients(STEPS, shapes, torch.bfloat16):
            passes.clear()
            steps(optimizer, params, [grads])
    return [optimizer.weights(p, p.data.view(-1), optimizer.shard(p)) for p in params], passes


@pytest.mark.parametrize("weight_update", ["stochastic", "nearest", "master", "master24"])
@pytest.mark.parametrize("name", ["galoreadamw", "apollo", "muon"])
def test_a_pass_over_equal_matrices_writes_the_bits_of_passes_over_each(
    name, weight_update, monkeypatch
):
    joined, few = step_in_16_bits(name, weight_update, monkeypatch, True)
    alone, many = step_in_16_bits(name, weight_update, monkeypatch, False)
    assert all(map(torch.equal, joined, alone))
    for name in set(many):  # two shapes instead of six matrices
        assert few.count(name) * 3 <= many.count(name)


@pytest.mark.parametrize("name, most", [("muon", 1), ("apollo", 3), ("galoreadamw", 0)])
def test_another_matrix_of_a_bucket_takes_few_operations_of_torch(name, most):
    few, many = (calls_of(name, (32, 48), n) for n in (2, 22))
    assert (many - few) / 20 <= most


def doubled(x):
    return (x * 2,)


def halved(x):
    return (x / 2,)


def asking(operation, x, found):
    (y,) = yield Joint(operation, x)
    (total,) = yield (y,)
    found.append(total)


@pytest.fixture
def sizes(monkeypatch):
    """How many matrices each joint operation answers."""
    return noted(monkeypatch, Joint, "answers", lambda self, joints: len(joints))


@pytest.mark.parametrize("run", [lambda steps: lockstep.run(steps, None), lockstep.lockstep])
def test_operations_are_joined_by_function_and_shape_and_results_keep_their_places(run, sizes):
    found = []
    xs = [torch.full((n,), float(i)) for i, n in enumerate((3, 4, 3, 3, 4))]
    operations = [doubled, doubled, halved, doubled, doubled]
    results = [[] for _ in xs]
    steps = [asking(*each) for each in zip(operations, xs, results, strict=True)]
    if run is lockstep.lockstep:
        for flat in run(steps):
            found.append(flat)
    else:
        assert run(steps) == 1
    assert sorted(sizes) == [1, 2, 2]
    for x, operation, (result,) in zip(xs, operations, results, strict=True):
        assert torch.equal(result, *operation(x))
    if found:  # a round's sums are in the order of the generators, which all ranks share
        expected = torch.cat([operation(x)[0] for operation, x in zip(operations, xs, strict=True)])
        assert torch.equal(*found, expected)


def test_no_more_matrices_wait_than_fill_a_block(sizes, monkeypatch):
    waiting, most = [0], [0]
    monkeypatch.setattr(block_sizes, "product_limit", lambda device: 100)

    def step():
        waiting[0] += 1
        most[0] = max(most[0], waiting[0])
        yield Joint(doubled, torch.zeros(30))
        waiting[0] -= 1

    assert lockstep.run([step() for _ in range(7)], None) == 0
    assert sizes == [3, 3, 1] and most == [3]
    sizes.clear()
    assert lockstep.run([asking(doubled, torch.zeros(101), []) for _ in range(2)], None) == 1
    assert sizes == [1, 1]  # a large matrix does not wait


def test_many_joints_of_one_matrix_neither_nest_nor_keep_results():
    alive = weakref.WeakSet()
    held = []

    def operation(x):
        return (x + 1,)

    def rule():
        for _ in range(3000):  # above Python's limit of nested calls
            (part,) = yield Joint(operation, torch.zeros(block_sizes.product_limit(CPU) + 1))
            alive.add(part)
            held.append(len(alive))

    with mock.patch.object(block_sizes, "product_limit", lambda device: 3):
        lockstep.run([rule()], None)
    assert len(held) == 3000 and max(held) <= 3


@pytest.mark.parametrize("bound", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_factors_on_the_device_are_projected_together(dtype, bound):
    shard, found = Shard.of_rank((32, 48), 1, 2), {}

    def step(i, g, q):
        found[i] = yield from lowrank.project(g, q, True, shard)

    grads = [Scaled(torch.randn(768).to(dtype), torch.tensor(i + 0.5), bound) for i in range(3)]
    bases = [torch.randn(4, 48).bfloat16().float() for _ in grads]
    lockstep.run([step(i, *each) for i, each in enumerate(zip(grads, bases, strict=True))], None)
    for i, (g, q) in enumerate(zip(grads, bases, strict=True)):
        values = g.x.double() * g.factor
        values = values if bound is None else values.clamp(-bound, bound)
        expected = torch.zeros(32, 4, dtype=torch.float64)
        expected[16:] = values.view(16, 48) @ q.double().T
        assert (found[i] - expected).norm() <= 1e-6 * expected.norm()


def test_stacks_of_matrix_products_are_as_large_as_a_block():
    left, right = torch.zeros(500, 4), torch.zeros(4, 512)
    asked = next(joint._multiplied(Product(left, right, 0), Shard.whole((500, 512))))
    assert 1 < asked.most <= block_sizes.product_limit(CPU) / (500 * 512)


SHAPES = [(1, 1, 1), (7, 5, 3), (13, 29, 17), (6, 2050, 64), (65, 1025, 130), (600, 33, 70)]
SHAPES += [(3, 0, 4), (0, 3, 4)]
# Largest error of a product, relative to |a| · |b|, by the operands' terms; that of fp32 sums.
SUMS = 2e-6
BOUNDS = {1: 2 * 2**-8 + SUMS, 2: 3 * 2**-16 + SUMS, 3: SUMS}


def wide(rows, cols, dtype, transposed=False, seed=0):
    """A matrix whose rows, columns and elements differ by orders of magnitude."""
    random = torch.Generator().manual_seed(rows * 1000 + cols + seed)
    x = torch.randn(rows, cols, generator=random)
    x *= 10 ** (4 * torch.rand(rows, 1, generator=random) - 2)
    x *= 10 ** (4 * torch.rand(1, cols, generator=random) - 2)
    x *= 10 ** (2 * torch.rand(rows, cols, generator=random) - 1)
    x = x.to(dtype)
    return x.T.contiguous().T if transposed else x


def error(found, a, b, before=0.0):
    """The largest error of an element, relative to the sum of the magnitudes of its products."""
    expected = a.double() @ b.double() + before
    scale = a.double().abs() @ b.double().abs() + abs(before)
    return float(((found - expected).abs() / scale.clamp(min=1e-300)).max()) if scale.numel() else 0


@pytest.fixture(params=[0, 1, products.MAX_BF16_PRODUCTS])
def most(request, monkeypatch):
    """Products of a CPU, of a smaller GPU, and of a data center's, by ``most_products``."""
    if request.param:
        paths.fast_bf16_products(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("m, k, n", SHAPES)
@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
def test_products_of_bf16_operands_are_exact(most, m, k, n, transposed):
    a, b = wide(m, k, torch.bfloat16, transposed[0]), wide(k, n, torch.bfloat16, transposed[1])
    found = product(a, b, 1)
    assert found.dtype == torch.float32 and error(found, a, b) <= SUMS
    out = torch.full((m, n + 3), 0.5)  # a part of its rows
    assert add_product_(out[:, 1:-2], a, b).data_ptr() == out[:, 1:-2].data_ptr()
    assert error(out[:, 1:-2], a, b, 0.5) <= SUMS
    assert (out[:, 0] == 0.5).all() and (out[:, -2:] == 0.5).all()
    out.fill_(3.0)
    assert error(add_product_(out[:, 1:-2], a, b, beta=0.25), a, b, 0.75) <= SUMS


@pytest.mark.parametrize("terms", BOUNDS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32,) * 2])
def test_more_terms_of_fp32_operands_have_smaller_errors(most, terms, dtypes):
    a, b = wide(65, 1025, dtypes[0]), wide(1025, 130, dtypes[1])
    found = error(product(a, b, terms), a, b)
    assert found <= BOUNDS[terms]
    if most == products.MAX_BF16_PRODUCTS and terms < 3:
        assert found > BOUNDS[terms + 1]  # the terms that are asked for, and no more
    if most == 0:
        assert found <= SUMS


@pytest.mark.parametrize("factor", [1.0, 0.3, torch.tensor(3.0)])
@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gradient_is_scaled_and_bounded_in_products(most, factor, bound, dtype):
    x, q = wide(13, 29, dtype), wide(29, 7, torch.float32).bfloat16().float()
    g = ops.Scaled(x.flatten().expand(3, -1), factor, bound)
    whole, used = Shard.whole((13, 29)), ops.operand_dtype(g)

    def by_rows(shard, b, part, q):
        return (b.rows, slice(None)), part, q[:, b.cols]

    q3, terms = q.expand(3, -1, -1), ops.terms_for(used)
    sums = products.summed_products(g, q3, whole, (13, 7), by_rows, terms)
    values = x.double() * float(factor)
    values = values if bound is None else values.clamp(-bound, bound)
    assert all(error(out, values, q) <= SUMS for out in sums)
    fast = dtype == torch.bfloat16 and bound is None and most > 0
    assert used == (torch.bfloat16 if fast else torch.float32)


def test_fp64_stays_fp64(most):
    a, b = wide(13, 29, torch.float64), wide(29, 17, torch.float64)
    found = product(a, b, 1)
    assert found.dtype == torch.float64 and error(found, a, b) < 1e-15


def test_what_is_not_finite_stays_so(most):
    a, b = wide(20, 31, torch.bfloat16), wide(31, 70, torch.bfloat16)
    a[7, 30], b[3, 65] = float("nan"), float("inf")
    found = product(a, b).isfinite()
    assert not found[7].any() and not found[:, 65].any()
    found[7], found[:, 65] = True, True
    assert found.all()


def test_a_gpu_multiplies_bf16_operands_with_fp32_sums(monkeypatch):
    """The call that CUDA supports, on torch's device without data."""
    monkeypatch.setattr(products, "most_products", lambda device: products.MAX_BF16_PRODUCTS)
    a, b = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta", dtype=torch.bfloat16)
    found = product(a, b, 2)
    assert found.shape == (3, 5) and found.dtype == torch.float32


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_fp16_operands_are_numbers_too(most, terms):
    a, b = wide(6, 40, torch.float32).half(), wide(40, 5, torch.float32).half()
    assert error(product(a, b, terms), a, b) <= BOUNDS[terms]
    x = ops.Product(a, b, 0, terms)
    whole = ops.evaluate(x, Shard.whole((6, 5)), torch.zeros(30)).view(6, 5)
    assert error(whole, a, b) <= BOUNDS[terms]


def test_shapes_that_do_not_match_are_refused(most):
    a, b = torch.ones(4, 5).bfloat16(), torch.ones(6, 3).bfloat16()
    with pytest.raises((ValueError, RuntimeError)):
        product(a, b)
    with pytest.raises(ValueError, match=r"does not fit into \[2, 3\]"):
        add_product_(torch.zeros(2, 3), a, torch.ones(5, 3).bfloat16())
    p = torch.zeros(12)
    for u in (ops.Product(a, b, 0, 1), ops.Product(a[:2], b[:5], 0, 1)):
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            ops.apply_(p, u, Shard.whole((4, 3)), lr=1.0)
    assert not p.any()
