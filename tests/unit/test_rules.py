"""LOMO, AdaLomo, Adafactor and CAME on simulated ranks against their authors' optimizers.

All awkward shapes are stepped together, as one bucket. test_formulas.py compares them with the
authors' code in fp64.
"""

import functools
import math

import pytest
import torch

import ds_ext
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from tests.common import plain, table
from tests.common.reference import Authors
from tests.common.simulated import Formula, Ranks
from tests.common.table import RULES, SHAPES

STEPS = 6


def ranks_of(name, params, world, **hypers):
    return Ranks(RULES[name].rule(**hypers), params, world)


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
        blocks=[("decay", SMALL)],
    )


SMALL = tuple(shape for shape in SHAPES if math.prod(shape) <= 400)
QUICK = (("adalomo", "decay", 1), ("came", "decay", 16))
FORMULAS = {name: formula(name) for name in RULES}


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
    def by_ours(p):
        (after,), _ = plain.stepped(lambda params: ds_ext.AdaLomo(params, **hypers), [p], [[g]])
        return after.double()

    def by_authors(p):
        reference = Authors("adalomo", [p], **hypers)
        reference.step([g.to(p.dtype)])
        return reference.params[0].detach().double()

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
