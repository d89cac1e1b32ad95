"""Products with fp32 sums are those in fp64, up to the rounding of their operands."""

import itertools

import pytest
import torch

from ds_ext import ops
from ds_ext.ops import products
from ds_ext.ops.products import add_product_, product
from ds_ext.ops.shard import Shard
from tests.common import paths

SHAPES = [(1, 1, 1), (7, 5, 3), (13, 29, 17), (6, 2050, 64), (65, 1025, 130), (600, 33, 70)]
SHAPES += [(3, 0, 4), (0, 3, 4)]
# Largest error of a product, relative to |a| · |b|, by the terms of the operands; with the error of
# sums in fp32.
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
