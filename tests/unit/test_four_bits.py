"""Gradients in 4 bits: what is lost when they are encoded."""

import math

import pytest
import torch

from ds_ext.distributed.int4_reduce_scatter import BLOCK_SIZE, decode, encode, num_bytes
from ds_ext.engine.quantized_gradients import WHAT_IT_COSTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000])
def test_each_value_is_within_a_step_of_its_256_and_the_largest_exact(n, dtype):
    torch.manual_seed(n)
    x = (torch.randn(3, 2, n) * torch.logspace(-4, 4, n)).to(dtype)
    code = encode(x)
    assert code.shape == (3, 2, num_bytes(n)) and code.dtype == torch.uint8
    found = decode(code, n)
    assert found.shape == x.shape and found.dtype == torch.float32
    for first in range(0, n, BLOCK_SIZE):
        some, its = (
            x[..., first : first + BLOCK_SIZE].float(),
            found[..., first : first + BLOCK_SIZE],
        )
        largest = some.abs().amax(-1, keepdim=True)
        off = (its - some).abs() / (largest / 8)
        assert (off <= 1 + 1e-5).all() and (off > 0.5 + 1e-5).float().mean() < 0.05
        assert (off[some.abs() == largest] < 1e-5).float().mean() > 0.9  # unless both signs have it
        assert len(its[0, 0].unique()) <= 16


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad):
    x = torch.randn(2, 3 * BLOCK_SIZE)
    x[0, BLOCK_SIZE + 5] = bad
    found = decode(encode(x), x.shape[1])
    assert not found[0, BLOCK_SIZE : 2 * BLOCK_SIZE].isfinite().any()
    found[0, BLOCK_SIZE : 2 * BLOCK_SIZE] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_values(value):
    x = torch.full((1, BLOCK_SIZE), value)
    torch.testing.assert_close(decode(encode(x), BLOCK_SIZE), x, rtol=1e-5, atol=2e-45)


def test_whole_parts_are_kept_exactly():
    x = torch.arange(-8, 8).repeat(16).float()
    assert torch.equal(decode(encode(x), BLOCK_SIZE), x)


def test_the_error_that_the_log_tells():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 2**16)  # hosts, ranks of a host
    within = decode(encode(x), 2**16).sum(1)
    total = decode(encode(within), 2**16).sum(0)
    exact = x.sum((0, 1))
    error = float((total - exact).norm() / exact.norm())
    assert f"about {100 * error:.0f} %" in WHAT_IT_COSTS
