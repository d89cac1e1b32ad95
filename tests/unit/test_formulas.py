"""Every rule on simulated ranks is its authors' code or its paper on whole parameters, in fp64.

The measure is the error relative to the total update of each parameter. The same measure is
applied to runs that are broken on purpose, to show that it can fail."""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import ds_ext
from ds_ext.distributed import lockstep
from ds_ext.ops import block_sizes
from ds_ext.ops.executors import unbatched
from ds_ext.ops.shard import WIDEST, Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import all_rules
from tests.common import plain, table
from tests.common.authors import lamb, of_paper
from tests.common.choose import params, spread
from tests.common.reference import authors
from tests.common.simulated import BROKEN, EXACT, Formula, Ranks, errors
from tests.common.table import RULES, SHAPES, VECTORS, WORLDS
from tests.unit import test_apollo, test_flashadamw, test_galore, test_muon, test_normalized

STEPS = 6


def ranks_of(name, params, world, **hypers):
    return Ranks(OPTIMIZERS[name].hypers(**hypers), params, world)


@functools.cache
def expected(name, setting, shapes=SHAPES):
    """The parameters of the authors' optimizer after some steps in fp64."""
    make = functools.partial(authors, name, **RULES[name][setting])
    return plain.stepped(make, table.weights(shapes), table.gradients(STEPS, shapes))[0]


def formula(name):
    return Formula(
        lambda setting: OPTIMIZERS[name].hypers(**RULES[name][setting]),
        functools.partial(expected, name),
        RULES[name],
        SHAPES,
        STEPS,
        blocks=[("decay", SMALL)],
    )


SMALL = tuple(shape for shape in SHAPES if math.prod(shape) <= 400)
OWN = {name: formula(name) for name in RULES}
OF_LAMB = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
OF_LAMB |= {"betas-eps": {"betas": (0.8, 0.95), "eps": 0.3}, "capped": {"max_coeff": 1.0}}
OF_LAMB |= {"uncorrected": {"bias_correction": False}}
OF_LAMB |= {"clamped": {"min_coeff": 0.5, "max_coeff": 1.5}}
OWN["lamb"] = of_paper(all_rules.LAMB, lamb, OF_LAMB, SHAPES, 10)
FORMULAS = {
    **OWN,
    **test_normalized.FORMULAS,
    **test_flashadamw.FORMULAS,
    "galore": test_galore.FORMULA,
    "apollo": test_apollo.FORMULA,
    "muon": test_muon.FORMULA,
}
# Each setting on two or three ranks, and each formula on seven. That a rule is the same on any
# other number, and on one: test_every_rule.py.
FEW = [
    (name, *case)
    for name, formula in FORMULAS.items()
    for case in spread(formula.settings, [(2,), (3,)][: len(formula.settings)])
]
BLOCKS = [(name, *case) for name, formula in FORMULAS.items() for case in formula.blocks]
ALL = FEW + [(name, [*formula.settings][-1], 7) for name, formula in FORMULAS.items()]


@pytest.mark.parametrize("name, setting, world", params(ALL, FEW))
def test_sharded_equals_the_formula(name, setting, world):
    assert FORMULAS[name].error(setting, world) <= EXACT


@pytest.mark.parametrize("name", FORMULAS)
def test_the_settings_matter(name):
    formula = FORMULAS[name]
    results = [formula.expected(setting, formula.shapes) for setting in formula.settings]
    for a, b in itertools.combinations(results, 2):
        assert max(errors(a, b, table.weights(formula.shapes))) > BROKEN


@pytest.mark.parametrize("limit", params([1, 4, 40], [4]))
@pytest.mark.parametrize("name, setting, shapes", BLOCKS)
def test_blocks_of_any_size_give_the_same(name, setting, shapes, limit, monkeypatch):
    def forget():  # shards and passes that are kept know the limit
        unbatched.forget_tables()
        Shard.whole.cache_clear()
        Shard.of_rank.cache_clear()

    monkeypatch.setattr("ds_ext.ops.shard.BLOCK", limit)
    monkeypatch.setattr("ds_ext.ops.shard.WIDEST", limit)
    monkeypatch.setattr(block_sizes, "product_limit", lambda device: limit)
    forget()
    try:
        assert FORMULAS[name].error(setting, 3, shapes) <= EXACT
    finally:
        forget()


# The rounds of each step: a rule, the shape of a parameter or those of a bucket, a number of ranks.
ROUNDS = [(all_rules.LAMB(), (13, 29), world, [1]) for world in WORLDS]
ROUNDS += [
    (all_rules.APOLLO(rank=4, update_proj_gap=2), (29, 13), world, [2] * 4) for world in WORLDS
]
GALORE = all_rules.GaLoreAdamW(rank=4, update_proj_gap=3)
# Where the basis is renewed: a slice of the gradient, the basis; then R; left, the update.
ROUNDS += [(GALORE, (29, 13), world, [3, 1, 1, 3]) for world in WORLDS]
ROUNDS += [(GALORE, (13, 29), world, [4, 2, 2, 4]) for world in WORLDS]
ROUNDS += [(GALORE, shape, 3, [0] * 4) for shape in ((5,), (4, 3, 5))]
ROUNDS += [(all_rules.Muon(), shape, 1, [0, 0]) for shape in ((29, 13), (13, 29), (16, 16))]
ROUNDS += [(all_rules.Muon(), shape, 2, [2, 2]) for shape in ((13, 29), (16, 16), (30, 14))]
ROUNDS += [(all_rules.Muon(), (29, 13), 2, [2, 2]), (all_rules.Muon(), (1, 1), 16, [0, 0])]
ROUNDS += [(all_rules.Muon(), shape, 16, [2, 2]) for shape in ((7, 1), (1, 7))]
# Groups of 32 elements that a cut goes through take one.
ROUNDS += [(all_rules.FlashAdamW(), (64, 32), 4, [0]), (all_rules.FlashAdamW(), (64, 32), 3, [1])]
ROUNDS += [
    (all_rules.FlashAdamW(), (33,), 1, [0]),
    (all_rules.FlashAdamW(), (33,), 2, [1]),
    (all_rules.Lion(), (33,), 3, [0]),
]
# Rows of a matrix that a cut goes through, and vectors, take more than whole rows.
ROUNDS += [
    (test_normalized.rule_of(case), shape, 3, [rounds])
    for case, (_, cut, whole) in test_normalized.SETTINGS.items()
    for shape, rounds in (((6, 5), whole), ((5, 6), cut), ((7,), cut))
]


# Rows of up to 2**14 columns are whole; wider ones take the rounds of rows that a cut goes through.
ROUNDS += [(all_rules.AdaLomo(), (2, WIDEST + more), 1, [1 + more]) for more in (0, 1)]
# Where a rank holds a part of a row, where rows are whole, and of vectors.
OF_BUCKETS = {
    all_rules.LOMO: (0, 0, 0),
    all_rules.AdaLomo: (2, 1, 1),
    all_rules.Adafactor: (2, 1, 1),
    all_rules.CAME: (3, 2, 1),
}
for world in (1, 3):
    whole = [(3 * world, 5), (world, 7), (2, world, 5)]  # 2 ranks or more hold a matrix each
    for rule, (cut, by_rows, of_vectors) in OF_BUCKETS.items():
        first = cut if world > 1 else by_rows
        ROUNDS += [(rule(), (13, 29), world, [first] * 3), (rule(), SHAPES, world, [first] * 3)]
        ROUNDS += [(rule(), shapes, world, [by_rows] * 3) for shapes in (whole, [*whole, *VECTORS])]
        ROUNDS += [(rule(), VECTORS, world, [of_vectors] * 3)]


@pytest.mark.parametrize("rule, shape, world, rounds", ROUNDS, ids=str)
def test_a_step_takes_few_rounds(rule, shape, world, rounds):
    shapes = shape if isinstance(shape[0], tuple) else [shape]
    ranks = Ranks(rule, table.weights(shapes), world)
    assert [ranks.step(grads) for grads in table.gradients(len(rounds), shapes)] == rounds


@pytest.mark.parametrize("name", RULES)
def test_a_round_is_one_flat_tensor_of_all_statistics(name):
    matrices = [s for s in SHAPES if len(s) > 1]
    statistics = sum(math.prod(s[:-2]) * (s[-2] + s[-1]) for s in matrices)
    columns = sum(math.prod(s[:-2]) * s[-1] for s in matrices)
    n, m = len(SHAPES), len(matrices)
    reduced = []

    def simulate(ranks):
        (steps,) = ranks
        lockstep.run(steps, SimpleNamespace(all_reduce=lambda x: reduced.append(x.shape)))

    ranks_of(name, table.weights(), 1).step(table.gradients(1)[0], simulate)
    expected = {
        "lomo": [],
        # with the square sums of weights, and for vectors of updates
        "adalomo": [(statistics + columns + n + n - m,)],
        "adafactor": [(statistics + columns + n + n - m,)],
        "came": [(statistics + columns + n - m,), (statistics,)],
    }
    assert reduced == expected[name]


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


# Steps that are nearly weight decay alone, where lomo_optim and AdaLomo are 2e-2 apart.


def gradients(shape):
    tiny = torch.randn(shape) * 1e-8
    spike = tiny.clone()
    spike.view(-1)[5] = 1e5
    return {"zeros": torch.zeros(shape), "tiny": tiny, "spike": spike}


@pytest.mark.parametrize("shape", [(64, 48), (48,)])
@pytest.mark.parametrize("kind", ["zeros", "tiny", "spike"])
def test_one_step_is_as_near_to_fp64_as_weights_of_fp32_can_be(kind, shape):
    def by_ours(p, make=ds_ext.AdaLomo):
        (after,), _ = plain.stepped(lambda params: make(params, **hypers), [p], [[g]])
        return after.double()

    by_authors = functools.partial(by_ours, make=functools.partial(authors, "adalomo"))

    hypers = {"lr": 1e-3, "weight_decay": 0.1}
    torch.manual_seed(0)
    p, g = torch.randn(shape) * 0.02, gradients(shape)[kind]
    exact = by_authors(p.double())
    update = (exact - p.double()).norm()
    assert (by_ours(p.double()) - exact).norm() <= 1e-9 * update
    least = (exact.float().double() - exact).norm()
    error, theirs = ((by(p) - exact).norm() for by in (by_ours, by_authors))
    assert error <= 1.01 * least and error <= theirs
    if kind == "zeros":
        assert theirs > 1.2 * error > 5e-3 * update


@pytest.mark.parametrize("p", [0.0, 2.0])
@pytest.mark.parametrize("g", [0.0, 3.0])
def test_lambs_ratio_is_one_where_a_norm_is_zero(p, g):
    optimizer = ds_ext.LAMB([torch.full((4,), p, requires_grad=True)], lr=0.1, eps=1e-12)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.full((4,), g)
    optimizer.step()
    ratio = p or 1.0  # u is 1 in every element, or 0
    assert torch.allclose(param.detach(), torch.full((4,), p - 0.1 * ratio * bool(g)))


def test_lambs_sums_of_squares_do_not_overflow_in_half_precision():
    # 40 * 300**2 is far above 65504, and the norm of the update too.
    p = torch.full((40,), 300.0, dtype=torch.float16)
    assert p.square().sum().isinf()
    ranks = Ranks(all_rules.LAMB(lr=0.25), [p], 3)
    ranks.step([torch.linspace(1, 60000, 40).half()])
    assert torch.equal(ranks.params[0], torch.full_like(p, 225.0))
    assert all(s["v"].dtype == torch.float32 for (s,) in ranks.states)
