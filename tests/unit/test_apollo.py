"""APOLLO on simulated ranks is its authors' code on whole matrices, with our projection.

The normal numbers that it draws from a counter: what they are, and their distribution.
"""

import copy
import functools
import itertools
import statistics

import pytest
import torch

import ds_ext
from ds_ext.ops import rounding, schema
from ds_ext.ops.normal import normals
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, zeros
from ds_ext.rules import apollo
from ds_ext.rules.apollo import APOLLO
from tests.common import low_rank, plain, table
from tests.common.reference import normal_numbers
from tests.common.simulated import Formula, Ranks, errors, ranks_after

STEPS = 6
GAP = 2  # a projection is renewed twice
SHAPES = ((13, 29), (29, 13), (16, 16), (1, 7), (7, 1), (1, 1), (3, 5), (64, 33))

SETTINGS = {
    "channel": {"rank": 4},
    "decay": {"rank": 3, "weight_decay": 0.3, "lr": 0.02, "scale": 2.0},
    "betas-eps": {"rank": 4, "betas": (0.8, 0.95), "eps": 0.1},
    "tensor": {"rank": 4, "scale_type": "tensor"},
    "mini": {"rank": 1, "scale": 128.0, "scale_type": "tensor", "lr": 0.02, "weight_decay": 0.1},
    "more than the short side": {"rank": 70},
}


def authors(before, steps, **hypers):
    """The parameters after ``steps``, by apollo_torch; their streams are 0."""

    def make(params):
        return low_rank.APOLLO(dict.fromkeys(params, 0), gap=GAP, **hypers)

    return plain.stepped(make, before, steps)[0]


@functools.cache
def expected(setting, shapes=SHAPES):
    hypers = {"scale": 1.0, "scale_type": "channel"} | SETTINGS[setting]
    return authors(table.weights(shapes), table.gradients(STEPS, shapes), **hypers)


FORMULA = Formula(
    lambda setting: APOLLO(**SETTINGS[setting], update_proj_gap=GAP),
    expected,
    SETTINGS,
    SHAPES,
    STEPS,
    blocks=[("decay", ((13, 29), (29, 13)))],
)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_bf16_gradients_give_updates_nearer_to_fp64_than_the_authors(scale_type):
    """Weights start at 0, so that their own rounding is relative to the updates."""
    for shape in ((96, 64), (64, 96)):
        before = [torch.zeros(shape, dtype=torch.float64)]
        grads = [[g.bfloat16()] for (g,) in table.gradients(STEPS, [shape])]
        own = {"rank": 16, "scale": 2.0, "scale_type": scale_type}
        expected = authors(before, [[g.double()] for (g,) in grads], **own)
        theirs = authors([before[0].bfloat16()], grads, **own)
        rule = APOLLO(**own, update_proj_gap=GAP)
        ranks = ranks_after(rule, [before[0].float()], grads, 3)
        (mine,), (of_authors,) = (errors(x, expected, before) for x in (ranks.params, theirs))
        assert mine <= 2**-8 and mine < of_authors / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_is_drawn_at_renewals_and_after_a_load(dtype, monkeypatch):
    """Its draws are counted; a loaded state has none until the next step.

    A resumed run draws the same, though its parameters have another order.
    """
    drawn = []
    monkeypatch.setattr(apollo, "normals", lambda *args: drawn.append(args[2]) or normals(*args))
    before, steps = table.weights(SHAPES, dtype), table.gradients(8, SHAPES, dtype)

    def start(weights):
        return ds_ext.APOLLO(weights, rank=4, update_proj_gap=3, weight_update="nearest")

    weights = [p.clone().requires_grad_() for p in before]
    optimizer = start(weights)
    plain.steps(optimizer, weights, steps[:5])
    assert drawn == [0] * len(SHAPES) + [1] * len(SHAPES)
    kept = copy.deepcopy(optimizer.state_dict())
    assert {key for s in kept["state"].values() for key in s} == {"step", "m", "v", "n", "stream"}
    for p in weights:
        q, alone = optimizer.state[p]["q"], APOLLO(rank=4).state_spec(Shard.whole(p.shape))
        assert q.shape == zeros(alone, p)["q"].shape
        assert q.dtype == dtype
    half = [p.detach().clone().requires_grad_() for p in weights]
    other = start(half[::-1])  # each parameter keeps its stream
    kept["state"] = {len(SHAPES) - 1 - i: s for i, s in kept["state"].items()}
    other.load_state_dict(kept)
    drawn.clear()
    plain.steps(other, half, steps[5:])  # the sixth step is in the middle of a period
    assert drawn == [1] * len(SHAPES) + [2] * len(SHAPES)
    plain.steps(optimizer, weights, steps[5:])
    assert all(map(torch.equal, weights, half))


@pytest.mark.parametrize("world", [1, 3])
def test_a_first_gradient_of_zero_does_not_bound_what_follows(world):
    p, steps = table.weights([(29, 13)]), table.gradients(3, [(29, 13)])
    ranks = Ranks(APOLLO(rank=4), p, world)
    ranks.step([torch.zeros_like(p[0])])
    assert torch.equal(ranks.params[0], p[0])
    moved = []
    for grads in steps:
        before = ranks.params[0]
        ranks.step(grads)
        moved.append(float((ranks.params[0] - before).norm()))
    fresh = ranks_after(APOLLO(rank=4), p, steps[:1])
    assert moved[0] > 0.1 * float((fresh.params[0] - p[0]).norm())
    assert all(torch.isfinite(x).all() for x in ranks.params)


def test_parameters_and_seeds_have_projections_of_their_own():
    (g,) = table.gradients(1, [(29, 13)])[0]

    def moved(seed):
        alike, optimizer = plain.stepped(
            lambda ps: ds_ext.APOLLO(ps, rank=2, seed=seed), [torch.zeros_like(g)] * 3, [[g] * 3]
        )
        assert [int(state["stream"]) for state in optimizer.state.values()] == [0, 1, 2]
        return alike

    found = [*moved(0), *moved(1)]
    for a, b in itertools.combinations(found, 2):
        assert float((a - b).norm() / a.norm()) > 0.01
    assert all(map(torch.equal, moved(0), found[:3]))


ALL = 2**20


@functools.cache
def drawn(stream=0, seed=0, draw=0, n=ALL):
    return normals(torch.tensor(stream), seed, draw, slice(0, n)).double()


@pytest.mark.parametrize("stream, seed, draw", [(0, 0, 0), (5, 3, 2), (2**31 + 7, 2**70, 10**6)])
def test_numbers_are_those_of_the_formula_bit_for_bit(stream, seed, draw):
    mine = normals(torch.tensor(stream), seed, draw, slice(0, 5000))
    expected = normal_numbers(stream, rounding.fold(seed) + draw * schema.PRIME2, draw, 5000)
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
