"""LOMO, AdaLomo, Adafactor and CAME on simulated ranks against their authors' optimizers.

All awkward shapes are stepped together, as one bucket. Runs that are broken on purpose show that
the measure can fail.
"""

import functools
import math

import pytest
import torch

import ds_ext.ops.shard
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.state import zeros
from tests.common import table
from tests.common.reference import Authors, Textbook
from tests.common.simulated import BROKEN, EXACT, Formula, Ranks, errors
from tests.common.states import same, tensors
from tests.common.table import CASES, REDUCING, RULES, SHAPES, VECTORS

STEPS = 6


def ranks_of(name, params, world, shift=0, **hypers):
    return Ranks(RULES[name].rule(**hypers), params, world, shift)


@functools.cache
def authors(name, setting, shapes=SHAPES):
    """The parameters of the authors' optimizer after some steps in fp64."""
    reference = Authors(name, table.weights(shapes), **RULES[name].settings[setting])
    for grads in table.gradients(STEPS, shapes):
        reference.step(grads)
    return reference.params


def formula(name):
    row = RULES[name]
    return Formula(
        lambda setting: row.rule(**row.settings[setting]),
        functools.partial(authors, name),
        row.settings,
        SHAPES,
        STEPS,
        # all settings on three ranks, some on one and on many
        lambda case: case[1] == 3 or (name, *case) in QUICK,
        missing=[("decay", world, SHAPES) for world in (2, 7)] if row.rounds else (),
    )


QUICK = (("adalomo", "decay", 1), ("came", "decay", 16))
FORMULAS = {name: formula(name) for name in RULES}


@pytest.mark.parametrize("name, setting", CASES)
def test_the_textbook_equals_the_authors(name, setting):
    hypers = RULES[name].settings[setting]
    textbook = Textbook(name, table.weights(), **hypers)
    for grads in table.gradients(STEPS):
        textbook.step(grads)
    assert max(errors(textbook.params, authors(name, setting), table.weights())) <= EXACT / 10


# fp32 cannot resolve updates that are small beside the weights, so these are large.
LARGE = {
    "lomo": {"lr": 0.1, "weight_decay": 0.1},
    "adalomo": {"lr": 0.1, "weight_decay": 0.1},
    "adafactor": {"lr": 0.1, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1},
    "came": {"lr": 0.02, "weight_decay": 0.1},
}


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("name", RULES)
def test_fp32_equals_the_authors_in_fp32(name, world):
    """Over more steps, for the errors of fp32 to be small beside the update."""
    before = table.weights(dtype=torch.float32)
    reference = Authors(name, before, **LARGE[name])
    ranks = ranks_of(name, before, world, **LARGE[name])
    for grads in table.gradients(20, dtype=torch.float32):
        reference.step(grads)
        ranks.step(grads)
    assert all(p.dtype == torch.float32 for p in ranks.params)
    assert max(errors(ranks.params, reference.params, before)) <= 1e-5


def replicated(state):
    """The part of a state that all ranks hold: row and column statistics."""
    return {k: v for k, v in state.items() if isinstance(v, dict) and "row" in v}


@pytest.mark.parametrize("world", [7])
@pytest.mark.parametrize("name", REDUCING)
def test_statistics_have_the_same_bits_on_all_ranks(name, world):
    ranks = ranks_of(name, table.weights(), world, **RULES[name].settings["decay"])
    for grads in table.gradients(5):
        ranks.step(grads)
    seen = 0
    for first, *others in zip(*ranks.states, strict=True):
        seen += len(replicated(first))
        for other in others:
            assert same(replicated(first), replicated(other))
    matrices = len(SHAPES) - len(VECTORS)
    assert seen == matrices * (2 if name == "came" else 1)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_reductions_per_bucket(name, world):
    row = RULES[name]
    rows = [(3 * world, 5), (world, 7), (2, world, 5)]  # 2 ranks or more hold a matrix each
    cut = row.rounds if world > 1 else row.row_rounds
    for shapes, expected in [
        (SHAPES, cut),
        ([(13, 29)], cut),
        (rows, row.row_rounds),
        ([*rows, *VECTORS], row.row_rounds),
        (VECTORS, row.vector_rounds),
    ]:
        bucket = ranks_of(name, table.weights(shapes), world)
        taken = [bucket.step(grads) for grads in table.gradients(3, shapes)]
        assert taken == [expected] * 3, shapes


@pytest.mark.parametrize("name", RULES)
def test_a_round_is_one_flat_tensor_of_all_statistics(name):
    matrices = [s for s in SHAPES if len(s) > 1]
    statistics = sum(math.prod(s[:-2]) * (s[-2] + s[-1]) for s in matrices)
    columns = sum(math.prod(s[:-2]) * s[-1] for s in matrices)
    n, m = len(SHAPES), len(matrices)
    rule = RULES[name].rule()
    params, (grads,) = table.weights(), table.gradients(1)
    shards = [Shard.whole(s) for s in SHAPES]
    reduced = []
    lockstep.run(
        [
            rule.step(
                p.flatten(), g.flatten(), zeros(rule.state_spec(shard), p.flatten()), 1, shard
            )
            for p, g, shard in zip(params, grads, shards, strict=True)
        ],
        lambda total: reduced.append(total.shape),
    )
    expected = {
        "lomo": [],
        # with the square sums of weights, and for vectors of updates
        "adalomo": [(statistics + columns + n + n - m,)],
        "adafactor": [(statistics + columns + n + n - m,)],
        "came": [(statistics + columns + n - m,), (statistics,)],
    }
    assert reduced == expected[name]


@pytest.fixture
def blocks_of(monkeypatch):
    """Sets the elements of a block. Shards that are kept know what it was."""

    def forget():
        for kept in (Shard.whole, Shard.of_rank):
            kept.cache_clear()

    def set_to(limit):
        monkeypatch.setattr(ds_ext.ops.shard, "BLOCK", limit)
        forget()

    yield set_to
    forget()


@pytest.mark.parametrize("limit", [1, 4, 40])
@pytest.mark.parametrize("name", RULES)
def test_blocks_of_any_size_give_the_same(name, limit, blocks_of, monkeypatch):
    largest = 0
    original = Shard.blocks

    def blocks(self, _=None):
        nonlocal largest
        for b in original(self):
            largest = max(largest, math.prod(b.shape))
            yield b

    blocks_of(limit)
    monkeypatch.setattr(Shard, "blocks", blocks)
    shapes = [s for s in SHAPES if math.prod(s) <= 400]
    assert (13, 29) in shapes and (2, 3, 4, 5) in shapes
    hypers = RULES[name].settings["decay"]
    reference = Authors(name, table.weights(shapes), **hypers)
    ranks = ranks_of(name, table.weights(shapes), 3, **hypers)
    for grads in table.gradients(3, shapes):
        reference.step(grads)
        ranks.step(grads)
    assert max(errors(ranks.params, reference.params, table.weights(shapes))) <= EXACT
    assert limit / 2 < largest <= limit


@pytest.mark.parametrize("name", REDUCING)
def test_bf16_gradients_and_weights_have_fp32_state(name):
    half = [p.bfloat16() for p in table.weights()]
    ranks = ranks_of(name, half, 3)
    exact = ranks_of(name, [p.float() for p in half], 3)
    for grads in table.gradients(3):
        grads = [g.bfloat16() for g in grads]
        ranks.step(grads)
        exact.step([g.float() for g in grads])
    assert all(p.dtype == torch.bfloat16 for p in ranks.params)
    for mine, theirs in zip(ranks.states, exact.states, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert all(x.dtype == torch.float32 for x in tensors(a))
            assert same(a, b)  # the gradient alone determines it


def one(name, p, g, steps=1, world=1, **hypers):
    """A single parameter after steps by the same gradient -> (p, states of all ranks)."""
    ranks = ranks_of(name, [p], world, **hypers)
    for _ in range(steps):
        ranks.step([g])
    return ranks.params[0], [states[0] for states in ranks.states]


def test_came_keeps_two_separate_second_moments():
    (p,), ((g,),) = table.weights([(13, 29)]), table.gradients(1, [(13, 29)])
    _, (state,) = one("came", p, g)
    memory = [x.untyped_storage().data_ptr() for x in tensors(state)]
    assert len(memory) == len(set(memory)) == 5
    for v, r in [(state["v"]["row"], state["r"]["row"]), (state["v"]["col"], state["r"]["col"])]:
        assert not torch.allclose(v, r, rtol=0.1)


def test_came_momentum_of_a_vector_is_not_scaled_by_lr():
    p, g = torch.zeros(5, dtype=torch.float64), torch.tensor([3.0, -1, 4, -1, 5]).double()
    for lr in (1e-3, 0.5):
        after, (state,) = one("came", p, g, lr=lr, clip_threshold=100.0)
        u = g.sign() / 0.001**0.5
        assert torch.allclose(state["m"], 0.1 * u, rtol=1e-12)
        assert torch.allclose(after, -lr * 0.1 * u, rtol=1e-12)


@pytest.mark.parametrize("clip, bounded", [(0.5, 0.5), (1.0, 1.0), (2.0, 1.0)])
@pytest.mark.parametrize("name", ["adalomo", "adafactor"])
def test_clip_bounds_large_updates_and_leaves_small_ones(name, clip, bounded):
    p, g = torch.ones(5, dtype=torch.float64), torch.tensor([3.0, -1, 4, -1, 5]).double()
    # beta2 is 0 in the first step, so u = sign(g), of RMS 1
    hypers = {"lr": 0.01, "clip_threshold": clip}
    if name == "adafactor":
        hypers["relative_step"] = False
    after, _ = one(name, p, g, **hypers)
    assert torch.allclose(p - after, 0.01 * bounded * g.sign(), rtol=1e-12)


@pytest.mark.parametrize("clip, bounded", [(1.0, 1.0), (100.0, 0.001**-0.5)])
def test_came_clips_before_momentum(clip, bounded):
    p, g = torch.ones(5, dtype=torch.float64), torch.tensor([3.0, -1, 4, -1, 5]).double()
    _, (state,) = one("came", p, g, clip_threshold=clip)
    assert torch.allclose(state["m"], 0.1 * bounded * g.sign(), rtol=1e-12)


@pytest.mark.parametrize("world", [2, 4, 16])
def test_rms_does_not_count_padding(world):
    p = torch.tensor([1.0, 2, 3, 4, 5]).double()  # padded to 6, 8 and 16 elements
    after, _ = one("adalomo", p, torch.ones_like(p), world=world, lr=0.1)
    assert torch.allclose(p - after, torch.full_like(p, 0.1 * 11**0.5), rtol=1e-12)


def test_adafactor_measures_the_weights_at_every_step():
    p, g = torch.ones(4, dtype=torch.float64), -torch.ones(4, dtype=torch.float64)
    # u = -1 at every step, so p grows by RMS(p): it doubles
    after, _ = one("adafactor", p, g, steps=5, lr=1.0, relative_step=False)
    assert torch.allclose(after, torch.full_like(p, 2.0**5), rtol=1e-12)


@pytest.mark.parametrize(
    "t, warmup, expected",
    [
        (1, False, 1e-2),
        (9_999, False, 1e-2),
        (40_000, False, 1 / 200),
        (1, True, 1e-6),
        (5_000, True, 5e-3),
        (40_000, True, 1 / 200),
    ],
)
def test_adafactor_relative_step_size(t, warmup, expected):
    p, g = torch.ones(4, dtype=torch.float64), torch.tensor([2.0, -2, 2, -2]).double()
    ranks = ranks_of("adafactor", [p], 1, scale_parameter=False, warmup_init=warmup)
    ranks.t = t - 1
    ranks.step([g])  # u = sign(g): all magnitudes are equal, and RMS(u) is clipped to 1
    assert torch.allclose(p - ranks.params[0], expected * g.sign(), rtol=1e-9)


# What follows breaks the package on purpose; the measure of exactness must see it.


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("name", REDUCING)
def test_geometry_shifted_by_one_is_seen(name, world, monkeypatch):
    monkeypatch.setattr(Shard, "holds_rows", property(lambda _: False))  # or it would fail
    assert FORMULAS[name].error("decay", world, shift=1) > BROKEN


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("name", RULES)
def test_gradients_shifted_by_one_are_seen(name, world, monkeypatch):
    original = Ranks.cut

    def cut(self, tensors):
        if self.t:  # gradients, not the weights at the start
            tensors = [t.flatten().roll(-1).view(t.shape) for t in tensors]
        return original(self, tensors)

    monkeypatch.setattr(Ranks, "cut", cut)
    assert FORMULAS[name].error("decay", world) > BROKEN


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("name", REDUCING)
def test_counting_the_padding_is_seen(name, world, monkeypatch):
    def rms(self, square_sum):
        return (square_sum / (-(-self.numel // world) * world)) ** 0.5

    monkeypatch.setattr(Shard, "rms", rms)
    assert FORMULAS[name].error("decay", world) > BROKEN


def test_a_block_out_of_place_is_seen(blocks_of, monkeypatch):
    original = Shard.blocks

    def blocks(self, _=None):
        for b in original(self):
            cols = b.cols
            if 0 < cols.start and cols.stop < self.cols:
                cols = slice(cols.start - 1, cols.stop - 1)
            yield Block(b.run, b.mats, b.rows, cols)

    blocks_of(7)
    monkeypatch.setattr(Shard, "blocks", blocks)
    assert FORMULAS["adalomo"].error("decay", 1) > BROKEN
