"""LAMB on simulated ranks is the paper's algorithm on whole parameters, to 1e-9 in fp64."""

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_ext
from ds_ext.distributed import lockstep
from ds_ext.ops import scratch
from ds_ext.ops.shard import Shard
from ds_ext.optimizer.bucket_step import begin_rules
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import all_rules
from tests.common import authors, paths, table
from tests.common.simulated import BROKEN, EXACT, Formula, Ranks, errors, stepped
from tests.common.table import SHAPES, WORLDS

STEPS = 10


SETTINGS = {
    "defaults": {},
    "decay": {"lr": 0.02, "weight_decay": 0.3},
    "betas-eps": {"betas": (0.8, 0.95), "eps": 0.3},
    "uncorrected": {"bias_correction": False},
    "clamped": {"min_coeff": 0.5, "max_coeff": 1.5},
    "capped": {"max_coeff": 1.0},
}


@functools.cache
def expected(setting, shapes):
    before, steps = table.weights(shapes), table.gradients(STEPS, shapes)
    return authors.by_formula(authors.lamb, before, steps, **SETTINGS[setting])


FORMULA = Formula(
    lambda setting: all_rules.LAMB(**SETTINGS[setting]),
    expected,
    SETTINGS,
    SHAPES,
    STEPS,
    lambda case: case[1] == 3 or case[0] == "decay",
    missing=[("decay", 3, SHAPES)],
)


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_takes_one_round(world):
    assert FORMULA.rounds("decay", world, SHAPES) == 1


# The norms and the elements' own updates do not depend on where a run lies, so a shard in the
# wrong place changes nothing; gradients in the wrong place do.
def test_gradients_shifted_by_one_are_seen(monkeypatch):
    original = Ranks.cut

    def cut(self, tensors):
        if self.t:
            tensors = [t.flatten().roll(1).view(t.shape) for t in tensors]
        return original(self, tensors)

    assert FORMULA.error("decay", 3, shift=1) <= EXACT
    monkeypatch.setattr(Ranks, "cut", cut)
    assert FORMULA.error("decay", 3) > BROKEN


def test_fp32_equals_the_paper():
    before, grads = table.weights(dtype=torch.float32), table.gradients(STEPS, dtype=torch.float32)
    ranks, _ = stepped(all_rules.LAMB(lr=0.1, weight_decay=0.1), SHAPES, 3, STEPS, torch.float32)
    doubles = [p.double() for p in before], [[g.double() for g in gs] for gs in grads]
    exact = authors.by_formula(authors.lamb, *doubles, lr=0.1, weight_decay=0.1)
    assert max(errors(ranks.params, exact, before)) <= 1e-5


@pytest.mark.parametrize("p", [0.0, 2.0])
@pytest.mark.parametrize("g", [0.0, 3.0])
def test_the_ratio_is_one_where_a_norm_is_zero(p, g):
    optimizer = ds_ext.LAMB([torch.full((4,), p, requires_grad=True)], lr=0.1, eps=1e-12)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.full((4,), g)
    optimizer.step()
    ratio = p or 1.0  # u is 1 in every element, or 0
    assert torch.allclose(param.detach(), torch.full((4,), p - 0.1 * ratio * bool(g)))


def test_sums_of_squares_do_not_overflow_in_half_precision():
    # 40 * 300**2 is far above 65504, and the norm of the update too.
    p = torch.full((40,), 300.0, dtype=torch.float16)
    assert p.square().sum().isinf()
    ranks = Ranks(all_rules.LAMB(lr=0.25), [p], 3)
    ranks.step([torch.linspace(1, 60000, 40).half()])
    assert torch.equal(ranks.params[0], torch.full_like(p, 225.0))
    assert all(s["v"].dtype == torch.float32 for (s,) in ranks.states)


@pytest.mark.parametrize("elements", [2**22])
def test_no_temporary_of_the_size_of_the_run(elements, monkeypatch):
    class Made(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
            result = func(*args, **(kwargs or {}))
            for t in tensors(result):
                if t.untyped_storage().data_ptr() not in given:
                    self.largest = max(self.largest, t.untyped_storage().nbytes() // t.itemsize)
            return result

    def tensors(x):
        return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]

    paths.use(monkeypatch, "ops")
    p = torch.ones(elements // 2**10, 2**10, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = ds_ext.LAMB([p])
    optimizer.step()
    monkeypatch.setattr(scratch, "_pools", scratch._Pools())
    with Made() as made:
        optimizer.step()
    assert made.largest == 2**19 < elements


def test_bf16_weights_are_rounded_alike_on_any_number_of_ranks():
    p = table.weights([(13, 29)])[0].bfloat16()
    grads = [gs[0].bfloat16() for gs in table.gradients(5, [(13, 29)])]
    results = []
    for world in (1, 4):
        cut = -(-p.numel() // world)
        param = torch.zeros(1)
        ranks = [ds_ext.LAMB([param], lr=0.01) for _ in range(world)]
        runs = [p.flatten()[r * cut : (r + 1) * cut].clone() for r in range(world)]
        for g in grads:
            steps = []
            for r, (optimizer, run) in enumerate(zip(ranks, runs, strict=True)):
                shard = Shard.of_rank(tuple(p.shape), r, world)
                part = g.flatten()[shard.start : shard.stop]
                steps.append([begin_rules(optimizer, RunUpdate(param, run, part, shard))[0]])
            with torch.no_grad():
                lockstep.simulate(steps)
        results.append(torch.cat(runs))
    assert math.isfinite(float(results[0].float().sum()))
    # The order of the norms' sums may turn a rounding here and there.
    assert (results[0] != results[1]).float().mean() < 0.01
    assert not torch.equal(results[0], p.flatten())
