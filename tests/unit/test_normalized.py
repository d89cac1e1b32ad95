"""SinkGD and SCALE on simulated ranks are the papers' algorithms on whole parameters."""

import pytest
import torch

import ds_ext
from ds_ext import ops
from ds_ext.ops.shard import Shard
from ds_ext.rules import all_rules
from tests.common import authors, needs, paths, plain, table
from tests.common.choose import params
from tests.common.simulated import Ranks, errors

SHAPES = ((5,), (1, 7), (7, 1), (3, 5), (16, 16), (13, 29), (64, 33), (4, 3, 5), (6, 2, 3, 3))
STEPS = 5
PAPERS = {"sinkgd": (all_rules.SinkGD, authors.sinkgd), "scale": (all_rules.SCALE, authors.scale)}
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


def rule_of(case):
    return PAPERS[case.split()[0]][0](**SETTINGS[case][0])


def formula(name):
    rule, by_paper = PAPERS[name]
    settings = {case: hypers for case, (hypers, *_) in SETTINGS.items() if case.startswith(name)}
    return authors.of_paper(rule, by_paper, settings, SHAPES, STEPS)


FORMULAS = {name: formula(name) for name in PAPERS}
LARGE = {
    "sinkgd": {"lr": 2.0, "weight_decay": 0.1},
    "scale": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


IN_FP32 = [(f"{name} defaults", factor) for name in PAPERS for factor in (1.0, 1e-9, 1e-12, 1e12)]


BY_PATH = [(*case, path) for case in IN_FP32 for path in ("native", "ops")]
if needs.TRITON:  # the smallest and largest factors, and what each kernel is asked for
    BY_PATH += [(*IN_FP32[i], "kernels") for i in (0, 2, 3, 4, 6)]
FOR_KERNELS = ((5,), (1, 7), (13, 29), (40, 17), (4, 3, 5))  # also more rows than a tile has


@pytest.mark.parametrize(
    "case, factor, path", params(BY_PATH, lambda case: case[-1] != "kernels" or case[1] == 1e12)
)
def test_fp32_equals_the_paper(case, factor, path, monkeypatch):
    """Also of gradients far below ``eps``, as long means without a loss scale give them.

    Wide, tall and stacked matrices of one bucket have rates of their own.
    """
    paths.use(monkeypatch, path)
    name = case.split()[0]
    hypers = LARGE[name] | SETTINGS[case][0]
    shapes, number = SHAPES, 3
    if path == "kernels":  # SinkGD keeps nothing for its next step
        shapes, number = FOR_KERNELS, 1 if case == "sinkgd defaults" else 2
    before = table.weights(shapes, torch.float32)
    steps = [[g * factor for g in gs] for gs in table.gradients(number, shapes, torch.float32)]
    ours = getattr(ds_ext, PAPERS[name][0].__name__)
    weights, _ = plain.stepped(lambda params: ours(params, **hypers), before, steps)
    doubles = [p.double() for p in before], [[g.double() for g in gs] for gs in steps]
    close = 1e-5 if "defaults" in case else 1e-4
    expected = authors.by_formula(PAPERS[name][1], *doubles, **hypers)
    assert max(errors(weights, expected, before)) <= close


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


def test_a_gradient_of_zeros_is_no_step():
    g = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ranks = Ranks(all_rules.SinkGD(lr=1.0), [torch.zeros_like(g)], 3)
    ranks.step([0 * g])
    assert not ranks.params[0].any()


@pytest.mark.parametrize("cols", [7, 5000])
@pytest.mark.parametrize("path", paths.EACH)
def test_a_row_with_a_nan_stays_nan(path, cols, monkeypatch):
    """A finite factor would make plausible weights of a gradient that nothing else checks."""
    paths.use(monkeypatch, path)
    shard = Shard.whole((3, cols))
    (x,) = table.weights([(3 * cols,)], torch.float32)
    x[cols + 2] = torch.nan
    rows, _ = ops.normalize_whole_rows(ops.unit_quotient(x, shard, x), 1e-8, shard, x)
    found = ops.evaluate(rows, shard, x).view(3, cols)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
