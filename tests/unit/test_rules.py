"""LOMO, AdaLomo, Adafactor, CAME and LAMB on simulated ranks against their authors' optimizers.

All awkward shapes are stepped together, as one bucket. test_formulas.py compares them with the
authors' code in fp64.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

import ds_ext
from ds_ext.distributed import lockstep
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import all_rules
from tests.common import plain, table
from tests.common.authors import lamb, of_paper
from tests.common.reference import authors
from tests.common.simulated import Formula, Ranks
from tests.common.table import RULES, SHAPES

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
FORMULAS = {name: formula(name) for name in RULES}
OF_LAMB = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
OF_LAMB |= {"betas-eps": {"betas": (0.8, 0.95), "eps": 0.3}, "capped": {"max_coeff": 1.0}}
OF_LAMB |= {"uncorrected": {"bias_correction": False}}
OF_LAMB |= {"clamped": {"min_coeff": 0.5, "max_coeff": 1.5}}
FORMULAS["lamb"] = of_paper(all_rules.LAMB, lamb, OF_LAMB, SHAPES, 10)


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


# LAMB, whose formula is that of its paper.


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
