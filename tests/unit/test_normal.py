"""Numbers from a counter, normal ones and random bits: what they are, and their distribution."""

import functools
import statistics

import pytest
import torch

from ds_ext.ops import rounding
from ds_ext.ops.normal import normals
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, zeros
from tests.common.reference import normal_numbers

ALL = 2**20


@functools.cache
def drawn(stream=0, seed=0, draw=0, n=ALL):
    return normals(torch.tensor(stream), seed, draw, slice(0, n)).double()


@pytest.mark.parametrize("stream, seed, draw", [(0, 0, 0), (5, 3, 2), (2**31 + 7, 2**70, 10**6)])
def test_numbers_are_those_of_the_formula_bit_for_bit(stream, seed, draw):
    mine = normals(torch.tensor(stream), seed, draw, slice(0, 5000))
    expected = normal_numbers(stream, rounding.key(seed, 0, draw), draw, 5000)
    assert mine.dtype == torch.float32
    assert torch.equal(mine, torch.from_numpy(expected))


@pytest.mark.parametrize("start, stop", [(0, 0), (0, 1), (1, 2), (1, 8), (6, 13), (4097, 70001)])
def test_a_part_of_a_sequence_is_the_part_of_all(start, stop):
    part = normals(torch.tensor(3), 1, 2, slice(start, stop))
    assert torch.equal(part.double(), drawn(3, 1, 2)[start:stop])


def test_moments_are_those_of_the_normal_distribution():
    x = drawn()
    for power, mean, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((x**power).mean()) - mean) < 5 * (spread / ALL) ** 0.5
    normal = statistics.NormalDist()
    for at in (-3, -1, 0, 0.5, 2):
        share = float((x < at).double().mean())
        assert abs(share - normal.cdf(at)) < 5 * (normal.cdf(at) / ALL) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 512, 65536])
def test_numbers_of_a_sequence_are_independent(lag):
    x = drawn()
    a, b = x[lag:], x[:-lag]
    for f in (lambda v: v, lambda v: v**2 - 1):
        assert abs(float((f(a) * f(b)).mean())) < 5 * 2 / len(a) ** 0.5


def test_sequences_are_independent():
    keys = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)]
    keys += [(7, 2**40, 9)]
    n = 2**16
    x = torch.stack([drawn(*key, n=n) for key in keys])
    correlations = x @ x.T / n - torch.eye(len(keys), dtype=x.dtype)
    assert correlations.abs().max() < 6 / n**0.5 * 2


def test_a_state_has_a_stream_for_each_parameter_and_each_expert():
    parts = {"stream": Part.stream(), "m": Part.like(Shard.whole((3,)))}
    nested = {"experts": {str(i): parts for i in range(64)}}
    streams = [int(zeros(parts, torch.zeros(3), number)["stream"]) for number in range(64)]
    for number in range(64):
        experts = zeros(nested, torch.zeros(3), number)["experts"]
        streams += [int(state["stream"]) for state in experts.values()]
        assert all(not state["m"].any() for state in experts.values())
    assert len(set(streams)) == 64 + 64 * 64
    assert all(0 <= stream < 2**32 for stream in streams)


def noise(n, key, start):
    bits = torch.zeros(n, dtype=torch.int32)
    rounding.add_noise_(bits, key, start)
    return bits


def test_noise_depends_on_the_element_not_on_the_cut():
    whole = noise(200_000, 17, 5)
    for start, n in ((400, 300), (2**16 - 8, 16), (2**16 - 5, 2**16 + 7), (199_999, 1)):
        assert torch.equal(whole[start : start + n], noise(n, 17, 5 + start))
    assert len(noise(0, 17, 3)) == 0


def test_noise_is_that_of_earlier_versions():
    """So that a resumed run rounds in the same way. All executors read one set of constants."""
    assert noise(4, 17, 5).tolist() == [15046, 25878, 43972, 51846]
    assert noise(3, rounding.key(2**40, 3, 7), 2**16 - 1).tolist() == [65100, 45815, 947]


def test_noise_differs_by_seed_parameter_and_step_and_is_uniform():
    seeds = [0, 1, 2, 7, 2**31, 2**32, 2**32 + 1, 2**64]
    keys = {rounding.key(s, n, t): s for s in seeds for n in range(20) for t in range(20)}
    assert len(keys) == 20 * 20 * len(seeds)
    for seed in seeds:
        of_seed = [key for key, s in keys.items() if s == seed][:100]
        assert_uniform([noise(4096, key, 0) for key in of_seed])
    first = [noise(4096, rounding.key(s, 0, 1), 0) for s in seeds]
    apart = torch.corrcoef(torch.stack(first).double()) - torch.eye(len(seeds))
    assert apart.abs().max() < 5 / 4096**0.5


def assert_uniform(draws):
    counts = torch.stack(draws).flatten().div(4096, rounding_mode="floor").bincount(minlength=16)
    expected = len(draws) * 4096 / 16
    # chi-square, 15 degrees, p = 1e-4, for there are eight seeds
    assert ((counts - expected) ** 2 / expected).sum() < 44.3
    neighbours = torch.corrcoef(torch.stack([draws[0], draws[1]]).double())[0, 1]
    assert abs(neighbours) < 4 / 4096**0.5
