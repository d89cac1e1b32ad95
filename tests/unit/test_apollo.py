"""APOLLO on simulated ranks is its authors' code with our projection, and its textbook in fp64."""

import copy
import functools
import itertools

import pytest
import torch

import ds_ext
from ds_ext.ops import products
from ds_ext.ops.normal import normals
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.rules import apollo
from ds_ext.rules.apollo import APOLLO, APOLLOMini
from tests.common import low_rank, plain, table
from tests.common.low_rank import projection
from tests.common.simulated import EXACT, Formula, Ranks, errors
from tests.common.table import WORLDS

STEPS = 12
GAP = 5  # a projection is renewed twice
SHAPES = ((13, 29), (29, 13), (16, 16), (1, 7), (7, 1), (1, 1), (3, 5), (64, 33))

SETTINGS = {
    "channel": {"rank": 4},
    "decay": {"rank": 3, "weight_decay": 0.3, "lr": 0.02, "scale": 2.0},
    "betas-eps": {"rank": 4, "betas": (0.8, 0.95), "eps": 0.1},
    "tensor": {"rank": 4, "scale_type": "tensor"},
    "mini": {"rank": 1, "scale": 128.0, "scale_type": "tensor", "lr": 0.02, "weight_decay": 0.1},
    "more than the short side": {"rank": 70},
    "seed": {"rank": 4, "seed": 2**40},
}


def textbook(
    p, grads, rank=256, scale=1.0, scale_type="channel", lr=1e-3, betas=(0.9, 0.999), eps=1e-6,
    weight_decay=0.0, seed=0, gap=GAP
):  # fmt: skip
    """The parameter after ``grads``, by the paper's formulas on the whole matrix in fp64."""
    tall = p.shape[0] >= p.shape[1]
    m = v = before = 0.0
    for t, g in enumerate(grads, 1):
        q = projection(min(p.shape), rank, (t - 1) // gap, seed)
        r = g @ q if tall else q.T @ g
        m, v = betas[0] * m + (1 - betas[0]) * r, betas[1] * v + (1 - betas[1]) * r**2
        n = m / (v.sqrt() + eps)
        if scale_type == "channel":
            along = {"dim": 1 if tall else 0, "keepdim": True}
        else:
            along = {}
        u = g * (torch.norm(n, **along) / (torch.norm(r, **along) + 1e-8))
        if t > 1:
            u = u / (max(float(u.norm()) / (before + 1e-8), 1.01) / 1.01)
        before = float(u.norm())
        step = lr * (1 - betas[1] ** t) ** 0.5 / (1 - betas[0] ** t)
        p = p - step * scale**0.5 * u
        p = p - lr * weight_decay * p
    return p


@functools.cache
def expected(setting, shapes=SHAPES):
    grads = zip(*table.gradients(STEPS, shapes), strict=True)
    return [
        textbook(p, gs, **SETTINGS[setting])
        for p, gs in zip(table.weights(shapes), grads, strict=True)
    ]


# What `make test` runs: each setting, each number of ranks.
QUICK = {*zip(SETTINGS, itertools.cycle((2, 3, 7)), strict=False)}
TALL, FLAT = ((29, 13),), ((13, 29),)
FORMULA = Formula(
    lambda setting: APOLLO(**SETTINGS[setting], update_proj_gap=GAP),
    expected,
    SETTINGS,
    SHAPES,
    STEPS,
    QUICK.__contains__,
    misplaced=[("channel", 3, TALL, 1), ("channel", 3, FLAT, 1)],
    blocks=[("decay", FLAT + TALL)],
)


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_takes_two_rounds(world):
    ranks = Ranks(APOLLO(rank=4, update_proj_gap=2), table.weights(SHAPES), world)
    assert [ranks.step(grads) for grads in table.gradients(4, SHAPES)] == [2] * 4


def authors(before, steps, **hypers):
    """The parameters after ``steps``, by apollo_torch; their streams are their numbers."""

    def make(params):
        return low_rank.APOLLO({p: i for i, p in enumerate(params)}, gap=GAP, **hypers)

    return plain.stepped(make, before, steps)[0]


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.float64, EXACT)])
@pytest.mark.parametrize("kind", [APOLLO, APOLLOMini])
def test_equals_the_authors(kind, dtype, close):
    before, steps = table.weights(SHAPES, dtype), table.gradients(STEPS, SHAPES, dtype)
    given = {"lr": 0.02, "weight_decay": 0.1}
    rule = kind(**given)
    own = {k: getattr(rule, k) for k in ("rank", "scale", "scale_type", "eps", "betas")}
    theirs = authors(before, steps, **given, **own)
    ours = getattr(ds_ext, kind.__name__)
    mine, _ = plain.stepped(lambda ps: ours(ps, **given, update_proj_gap=GAP), before, steps)
    assert max(errors(mine, theirs, before)) <= close


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_bf16_gradients_give_updates_nearer_to_fp64_than_the_authors(scale_type):
    """Weights start at 0, so that their own rounding is relative to the updates."""
    for shape in ((96, 64), (64, 96)):
        before = [torch.zeros(shape, dtype=torch.float64)]
        grads = [[g.bfloat16()] for (g,) in table.gradients(STEPS, [shape])]
        own = {"rank": 16, "scale": 2.0, "scale_type": scale_type}
        expected = [textbook(before[0], [g.double() for (g,) in grads], **own)]
        theirs = authors([before[0].bfloat16()], grads, **own)
        ranks = Ranks(APOLLO(**own, update_proj_gap=GAP), [before[0].float()], 3)
        for of_step in grads:
            ranks.step(of_step)
        (mine,), (of_authors,) = (errors(x, expected, before) for x in (ranks.params, theirs))
        assert mine <= 2**-8 and mine < of_authors / 2


# The stored projection.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_is_drawn_at_renewals_and_after_a_load(dtype, monkeypatch):
    """Its draws are counted; a loaded state has none until the next step."""
    drawn = []
    monkeypatch.setattr(apollo, "normals", lambda *args: drawn.append(args[2]) or normals(*args))
    before, steps = table.weights(SHAPES, dtype), table.gradients(8, SHAPES, dtype)

    def start(weights):
        return ds_ext.APOLLO(weights, rank=4, update_proj_gap=3)

    weights = [p.clone().requires_grad_() for p in before]
    optimizer = start(weights)
    plain.steps(optimizer, weights, steps[:5])
    assert drawn == [0] * len(SHAPES) + [1] * len(SHAPES)
    kept = copy.deepcopy(optimizer.state_dict())
    assert {key for s in kept["state"].values() for key in s} == {"step", "m", "v", "n", "stream"}
    for p in weights:
        q, alone = optimizer.state[p]["q"], APOLLO(rank=4).state_spec(Shard.whole(p.shape))
        is_fast = products.most_products(p.device) > 0
        assert q.shape == zeros(alone, p)["q"].shape
        assert q.dtype == (dtype if is_fast else torch.float32)
    half = [p.detach().clone().requires_grad_() for p in weights]
    other = start(half)
    other.load_state_dict(kept)
    drawn.clear()
    plain.steps(other, half, steps[5:])  # the sixth step is in the middle of a period
    assert drawn == [1] * len(SHAPES) + [2] * len(SHAPES)
    plain.steps(optimizer, weights, steps[5:])
    assert all(map(torch.equal, weights, half))


# The norm-growth limiter.


@pytest.mark.parametrize("world", [1, 3])
def test_an_update_grows_by_a_hundredth_at_most(world):
    (p,), (g,) = table.weights([(13, 29)]), table.gradients(1, [(13, 29)])[0]
    ranks = Ranks(APOLLO(rank=4, lr=1.0, betas=(0.0, 0.0), eps=1e-12), [p], world)
    norms = []
    for factor in (1.0, 1e6, 1e6, 1e-3):
        before = ranks.params[0]
        ranks.step([g * factor])
        norms.append(float((ranks.params[0] - before).norm()))
    # without momentum an update does not depend on the gradient's scale: 1.01 is not reached
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
    ranks = Ranks(APOLLO(rank=4, lr=1.0, betas=(0.0, 0.999), eps=1e-12), [p], world)
    norms = []
    for t, factor in enumerate((1.0, 1e-3, 1.0, 1.0), 1):
        before = ranks.params[0]
        ranks.step([g * factor])
        norms.append(float((ranks.params[0] - before).norm()) / (1 - 0.999**t) ** 0.5)
    assert norms[1] < 0.01 * norms[0]
    assert norms[2] / norms[1] == pytest.approx(1.01)
    assert norms[3] / norms[2] == pytest.approx(1.01)


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
    fresh = Ranks(APOLLO(rank=4), p, 1)
    fresh.step(steps[0])
    assert moved[0] > 0.1 * float((fresh.params[0] - p[0]).norm())
    assert all(torch.isfinite(x).all() for x in ranks.params)


# The streams of random numbers.


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


@pytest.mark.parametrize("kind", ["APOLLO", "APOLLOMini"])
def test_a_resumed_run_draws_the_same_though_parameters_have_another_order(kind):
    steps, before = table.gradients(9, SHAPES, torch.float32), table.weights(SHAPES, torch.float32)

    def go_on(optimizer, weights, gradients):
        plain.steps(optimizer, weights, gradients)
        return [p.detach().clone() for p in weights]

    def start(weights):
        return getattr(ds_ext, kind)(weights, lr=0.02, update_proj_gap=4)

    weights = [p.clone().requires_grad_() for p in before]
    optimizer = start(weights)
    go_on(optimizer, weights, steps[:5])
    saved = copy.deepcopy(optimizer.state_dict())
    half = [p.detach().clone().requires_grad_() for p in weights]
    whole = go_on(optimizer, weights, steps[5:])
    other = start(half[::-1])
    saved["state"] = {len(SHAPES) - 1 - i: s for i, s in saved["state"].items()}
    other.load_state_dict(saved)
    assert all(map(torch.equal, whole, go_on(other, half, steps[5:])))
