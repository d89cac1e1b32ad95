"""SinkGD and SCALE on simulated ranks are the papers' algorithms on whole parameters."""

import itertools

import pytest
import torch

import ds_ext
from ds_ext import rules
from ds_ext.ops.shard import Shard
from tests.common import authors, paths, plain, table
from tests.common.choose import params
from tests.common.simulated import BROKEN, EXACT, Ranks, dropping, errors, stepped
from tests.common.table import MANY, WORLDS

SHAPES = ((5,), (1, 7), (7, 1), (3, 5), (16, 16), (13, 29), (64, 33), (4, 3, 5), (6, 2, 3, 3))
STEPS = 5


PAPERS = {"sinkgd": (rules.SinkGD, authors.sinkgd), "scale": (rules.SCALE, authors.scale)}
# Hyper-parameters, and the rounds of a bucket in which rows are divided, and are not.
SETTINGS = {
    "sinkgd defaults": ({}, 10, 5),
    "sinkgd decay": ({"lr": 0.3, "alpha": 0.5, "weight_decay": 0.3}, 10, 5),
    "sinkgd iterations": ({"iterations": 2}, 4, 2),
    "sinkgd eps": ({"eps": 4.0}, 10, 5),
    "scale defaults": ({}, 1, 0),
    "scale decay": ({"lr": 0.02, "weight_decay": 0.3}, 1, 0),
    "scale embedding": ({"norm_axis": "column", "weight_decay": 0.3}, 1, 1),
    "scale head": ({"momentum": 0.9}, 1, 0),
    "scale eps": ({"eps": 1.0}, 1, 0),
}


def by_paper(name, before, steps, **hypers):
    """The parameters after the gradients ``steps`` by the paper's algorithm."""
    params, states = list(before), [{} for _ in before]
    for grads in steps:
        found = zip(params, grads, states, strict=True)
        params = [PAPERS[name][1](p, g, s, **hypers) for p, g, s in found]
    return params


def expected(case, before, steps):
    return by_paper(case.split()[0], before, steps, **SETTINGS[case][0])


def rule_of(case):
    return PAPERS[case.split()[0]][0](**SETTINGS[case][0])


def worst_error(case, world, shapes=SHAPES, **how):
    before, grads = table.weights(shapes), table.gradients(STEPS, shapes)
    ranks, _ = stepped(rule_of(case), shapes, world, STEPS, **how)
    return max(errors(ranks.params, expected(case, before, grads), before))


@pytest.mark.parametrize(
    "case, world",
    params(itertools.product(SETTINGS, WORLDS), lambda c: c[1] in (1, 3) or "decay" in c[0]),
)
def test_sharded_equals_the_paper(case, world):
    assert worst_error(case, world) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sinkgd decay", "scale embedding"])
def test_more_ranks_than_elements(case):
    assert worst_error(case, MANY, ((5,), (1, 7), (64, 33))) <= EXACT


@pytest.mark.parametrize("name", PAPERS)
def test_the_settings_matter(name):
    before, grads = table.weights(SHAPES), table.gradients(STEPS, SHAPES)
    results = [expected(case, before, grads) for case in SETTINGS if name in case]
    for a, b in itertools.combinations(results, 2):
        assert max(errors(a, b, before)) > BROKEN


@pytest.mark.parametrize("case", SETTINGS)
def test_whole_rows_take_fewer_rounds(case):
    _, cut, whole = SETTINGS[case]
    for shape, expected_rounds in (((6, 5), whole), ((5, 6), cut), ((7,), cut)):
        assert stepped(rule_of(case), (shape,), 3, 1)[1] == {expected_rounds}


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=["whole rows", "cut rows"])
@pytest.mark.parametrize("case", ["sinkgd decay", "scale embedding", "scale decay"])
def test_a_missing_reduction_is_seen(case, shape):
    _, cut, whole = SETTINGS[case]
    rounds = whole if shape == (12, 5) else cut
    assert worst_error(case, 3, (shape,), simulate=dropping(None)) <= EXACT
    for number in range(rounds):
        assert worst_error(case, 3, (shape,), simulate=dropping(number)) > 1e-6


@pytest.mark.parametrize("case", ["sinkgd decay", "scale embedding", "scale decay"])
def test_a_run_in_the_wrong_place_is_seen(case):
    assert worst_error(case, 3, ((13, 29),), shift=5) > BROKEN


LARGE = {
    "sinkgd": {"lr": 2.0, "weight_decay": 0.1},
    "scale": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


@pytest.mark.parametrize("path", ["native", "ops"])
@pytest.mark.parametrize("factor", [1.0, 1e-9, 1e-12, 1e12])
@pytest.mark.parametrize("name", PAPERS)
def test_fp32_equals_the_paper(name, factor, path, monkeypatch):
    """Also of gradients far below ``eps``, as long means without a loss scale give them."""
    paths.use(monkeypatch, path)
    before = table.weights(SHAPES, torch.float32)
    steps = [[g * factor for g in gs] for gs in table.gradients(3, SHAPES, torch.float32)]
    ours = getattr(ds_ext, PAPERS[name][0].__name__)
    weights, _ = plain.stepped(lambda params: ours(params, **LARGE[name]), before, steps)
    doubles = [p.double() for p in before], [[g.double() for g in gs] for gs in steps]
    exact = by_paper(name, *doubles, **LARGE[name])
    assert max(errors(weights, exact, before)) <= 1e-5


@pytest.mark.parametrize("path", ["native", "ops"])
@pytest.mark.parametrize("name", PAPERS)
def test_rows_and_columns_of_zeros_stay_as_they_are(name, path, monkeypatch):
    """However large their factors become in the iterations of many steps."""
    paths.use(monkeypatch, path)
    p = torch.nn.Parameter(torch.ones(9, 12))
    p.grad = torch.randn(9, 12, generator=torch.Generator().manual_seed(0))
    p.grad[4], p.grad[:, 7] = 0, 0
    optimizer = getattr(ds_ext, PAPERS[name][0].__name__)([p], lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert p.isfinite().all() and (p != 1).equal(p.grad != 0)


@pytest.mark.parametrize("name", PAPERS)
def test_rounding_is_seen_where_a_row_has_nothing_else(name):
    """It moves an update by some times its size, but a row that is rounding alone by all of it."""
    shape, generator = (64, 33), torch.Generator().manual_seed(0)
    (g,) = table.gradients(1, (shape,))[0]
    noise = torch.randn(shape, generator=generator, dtype=g.dtype) * 1e-7 * g.square().mean().sqrt()
    rows = torch.arange(64)[:, None] % 4 > 0

    def stepped(g):
        ranks = Ranks(PAPERS[name][0](), [torch.zeros_like(g)], 3)
        ranks.step([g])
        return ranks.params[0]

    def moved(g, by):
        return float((stepped(g + by) - stepped(g)).norm() / stepped(g).norm())

    assert moved(g, noise) < 1e-5
    assert moved(g * rows, noise * rows) < 1e-5
    assert moved(g * rows, noise) > 0.5


def test_nothing_is_kept_but_the_momentum_of_the_head():
    shard = Shard.of_rank((64, 32), 0, 4)
    assert rules.SinkGD().state_spec(shard) == rules.SCALE().state_spec(shard) == {}
    assert set(rules.SCALE(momentum=0.9).state_spec(shard)) == {"m"}
