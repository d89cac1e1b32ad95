"""Stochastic rounding: unbiased, the same however a parameter is cut, and only where it is due."""

import pytest
import torch

from ds_ext import AdaLomo, precision, rounds
from ds_ext.optimizer import Update
from ds_ext.shard import Shard


def test_a_value_goes_to_its_two_neighbours_and_on_average_nowhere():
    value = 1.0 + 2**-7 * 0.3  # three tenths of the way from 1 to the next bf16
    x = torch.full((200_000,), value)
    rounded = precision.round_stochastic(x, key=3, start=0)
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    share = (rounded > 1).double().mean().item()
    assert share == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / len(x)) ** 0.5)


def test_what_bf16_can_hold_stays():
    x = torch.randn(1000).bfloat16().float()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    for values in (x, special):
        assert torch.equal(precision.round_stochastic(values, 1, 0), values)
    assert precision.round_stochastic(torch.tensor([torch.nan]), 1, 0).isnan().all()


def test_bits_depend_on_the_element_not_on_the_cut():
    whole = precision.random_bits(1000, 17, 5, torch.device("cpu"))
    part = precision.random_bits(300, 17, 5 + 400, torch.device("cpu"))
    assert torch.equal(whole[400:700], part)


def test_bits_differ_by_parameter_and_step_and_are_uniform():
    shard = Shard.whole((1,))
    p = torch.zeros(1, dtype=torch.bfloat16)
    keys = {precision.weight(p, n, t, shard).key for n in range(50) for t in range(50)}
    assert len(keys) == 2500
    draws = [precision.random_bits(4096, key, 0, p.device) & 0xFFFF for key in list(keys)[:100]]
    counts = torch.stack(draws).flatten().div(4096, rounding_mode="floor").bincount(minlength=16)
    expected = 100 * 4096 / 16
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees, p = 0.001
    neighbours = torch.corrcoef(torch.stack([draws[0], draws[1]]).double())[0, 1]
    assert abs(neighbours) < 4 / 4096**0.5


def test_high_counters_wrap_like_unsigned_integers():
    at = 2**31 - 3
    across = precision.random_bits(6, 99, at, torch.device("cpu"))
    assert torch.equal(across[3:], precision.random_bits(3, 99, at + 3, torch.device("cpu")))


def test_fp32_weights_are_written_as_they_are():
    p = torch.zeros(3)
    assert precision.weight(p, 0, 1, Shard.whole((3,))) is p


@pytest.mark.parametrize("world", [2, 3, 7])
def test_a_sharded_bf16_step_has_the_bits_of_a_whole_one(world):
    torch.manual_seed(0)
    shape = (13, 29)
    p, g = torch.randn(shape).bfloat16(), torch.randn(shape)

    def steps(cut):
        parts = [Shard.of_rank(shape, r, cut) for r in range(cut)]
        runs = [p.flatten()[s.start : s.stop].clone() for s in parts]
        optimizers = [AdaLomo([torch.nn.Parameter(p)], lr=1e-3) for _ in parts]
        for _ in range(5):
            rules = []
            for optimizer, run, s in zip(optimizers, runs, parts, strict=True):
                (param,) = optimizer.param_groups[0]["params"]
                piece = g.flatten()[s.start : s.stop].clone()
                rules.append([optimizer._begin(Update(param, run, piece, s))])
            with torch.no_grad():
                rounds.simulate(rules)
        return torch.cat(runs)

    assert torch.equal(steps(world), steps(1))


def test_small_updates_are_not_lost():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
    optimizer = AdaLomo([p], lr=1e-4)
    for _ in range(20):
        p.grad = torch.ones_like(p)
        optimizer.step()
    # u = 1 at every step, so p falls by lr · RMS(p) each: far less than half of bf16's spacing
    assert p.float().mean().item() == pytest.approx((1 - 1e-4) ** 20, abs=3e-4)
    assert torch.nextafter(torch.tensor(1.0).bfloat16(), torch.tensor(0.0).bfloat16()) < 1 - 1e-3
