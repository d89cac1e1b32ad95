"""SinkGD and SCALE on simulated ranks are the papers' algorithms on whole parameters."""

import itertools

import pytest
import torch

import ds_ext
from ds_ext import ops, rules
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Shard
from tests.common import paths, table
from tests.common.choose import params
from tests.common.table import MANY, WORLDS
from tests.unit.test_lamb import BROKEN, EXACT, Ranks, dropping, errors

SHAPES = ((5,), (1, 7), (7, 1), (3, 5), (16, 16), (13, 29), (64, 33), (4, 3, 5), (6, 2, 3, 3))
STEPS = 5


def sinkgd(p, grads, lr=1e-3, iterations=5, alpha=0.05, eps=1e-8, weight_decay=0.0):
    """Algorithm 4 of arXiv 2502.06742 -> the parameter after the gradients ``grads``."""
    for g in grads:
        x = g.view(1, -1) if g.dim() < 2 else g
        rows, cols = x.shape[-2:]
        for _ in range(iterations):
            x = x * (cols**0.5 / x.norm(dim=-1, keepdim=True).clamp(min=eps))
            x = x * (rows**0.5 / x.norm(dim=-2, keepdim=True).clamp(min=eps))
        p = p * (1 - lr * alpha * weight_decay) - lr * alpha * x.view(p.shape)
    return p


def scale(p, grads, lr=1e-3, norm_axis="row", momentum=0.0, eps=1e-8, weight_decay=0.0):
    """Algorithm 1 of arXiv 2506.16659, with the layouts of its authors' code."""
    m = torch.zeros_like(p)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        x = m.view(1, -1) if m.dim() < 2 else m
        rms = x.square().mean(dim=-1 if norm_axis == "row" else -2, keepdim=True).sqrt()
        p = p * (1 - lr * weight_decay) - lr * (x / rms.clamp(min=eps)).view(p.shape)
    return p


PAPERS = {"sinkgd": (rules.SinkGD, sinkgd), "scale": (rules.SCALE, scale)}
# Hyper-parameters, and the rounds of a bucket in which rows are divided, and are not.
SETTINGS = {
    ("sinkgd", "defaults"): ({}, 10, 5),
    ("sinkgd", "decay"): ({"lr": 0.3, "alpha": 0.5, "weight_decay": 0.3}, 10, 5),
    ("sinkgd", "iterations"): ({"iterations": 2}, 4, 2),
    ("sinkgd", "eps"): ({"eps": 4.0}, 10, 5),
    ("scale", "defaults"): ({}, 1, 0),
    ("scale", "decay"): ({"lr": 0.02, "weight_decay": 0.3}, 1, 0),
    ("scale", "embedding"): ({"norm_axis": "column", "weight_decay": 0.3}, 1, 1),
    ("scale", "head"): ({"momentum": 0.9}, 1, 0),
    ("scale", "eps"): ({"eps": 1.0}, 1, 0),
}


def expected(case, before, steps):
    of = zip(before, zip(*steps, strict=True), strict=True)
    return [PAPERS[case[0]][1](p, grads, **SETTINGS[case][0]) for p, grads in of]


def ranks_of(case, before, world, shift=0):
    return Ranks(PAPERS[case[0]][0](**SETTINGS[case][0]), before, world, shift)


def worst_error(case, world, shapes=SHAPES, shift=0, simulate=lockstep.simulate):
    before, grads = table.weights(shapes), table.gradients(STEPS, shapes)
    ranks = ranks_of(case, before, world, shift)
    for g in grads:
        ranks.step(g, simulate)
    return max(errors(ranks.params, expected(case, before, grads), before))


@pytest.mark.parametrize(
    "case, world",
    params(itertools.product(SETTINGS, WORLDS), lambda c: c[1] in (1, 3) or c[0][1] == "decay"),
)
def test_sharded_equals_the_paper(case, world):
    assert worst_error(case, world) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", [("sinkgd", "decay"), ("scale", "embedding")])
def test_more_ranks_than_elements(case):
    assert worst_error(case, MANY, ((5,), (1, 7), (64, 33))) <= EXACT


@pytest.mark.parametrize("name", PAPERS)
def test_the_settings_matter(name):
    before, grads = table.weights(SHAPES), table.gradients(STEPS, SHAPES)
    results = [expected(case, before, grads) for case in SETTINGS if case[0] == name]
    for a, b in itertools.combinations(results, 2):
        assert max(errors(a, b, before)) > BROKEN


@pytest.mark.parametrize("case", SETTINGS)
def test_whole_rows_take_fewer_rounds(case):
    _, cut, whole = SETTINGS[case]
    for shape, expected_rounds in (((6, 5), whole), ((5, 6), cut), ((7,), cut)):
        (p,), ((g,),) = table.weights((shape,)), table.gradients(1, (shape,))
        assert ranks_of(case, [p], 3).step([g]) == expected_rounds


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=["whole rows", "cut rows"])
@pytest.mark.parametrize("case", [("sinkgd", "decay"), ("scale", "embedding"), ("scale", "decay")])
def test_a_missing_reduction_is_seen(case, shape):
    _, cut, whole = SETTINGS[case]
    rounds = whole if shape == (12, 5) else cut
    assert worst_error(case, 3, (shape,), simulate=dropping(None)) <= EXACT
    for number in range(rounds):
        assert worst_error(case, 3, (shape,), simulate=dropping(number)) > 1e-6


@pytest.mark.parametrize("case", [("sinkgd", "decay"), ("scale", "embedding"), ("scale", "decay")])
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
    weights = [torch.nn.Parameter(p.clone()) for p in before]
    optimizer = getattr(ds_ext, PAPERS[name][0].__name__)(weights, **LARGE[name])
    for gs in steps:
        for p, g in zip(weights, gs, strict=True):
            p.grad = g
        optimizer.step()
    exact = [
        PAPERS[name][1](p.double(), [g.double() for g in gs], **LARGE[name])
        for p, gs in zip(before, zip(*steps, strict=True), strict=True)
    ]
    assert max(errors([p.detach() for p in weights], exact, before)) <= 1e-5


@pytest.mark.parametrize("path", ["native", "ops"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", PAPERS)
def test_rows_and_columns_of_zeros_stay_as_they_are(name, world, path, monkeypatch):
    paths.use(monkeypatch, path)
    g = torch.randn(9, 12, generator=torch.Generator().manual_seed(0))
    g[4], g[:, 7] = 0, 0
    p = torch.ones(9, 12)
    ranks = Ranks(PAPERS[name][0](**LARGE[name] | {"weight_decay": 0.0}), [p], world)
    for _ in range(3):
        ranks.step([g])
    moved = ranks.params[0] != p
    assert moved.equal(g != 0) and ranks.params[0].isfinite().all()


@pytest.mark.parametrize("shape", [(70, 1100), (300, 40), (500, 700), (6, 5, 3, 3), (9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_pass_over_whole_rows_is_that_of_torch(shape, dtype):
    """Of several parameters, and of a part of their rows; gradients are scaled and bounded."""
    pytest.importorskip("numpy")
    shards = [Shard.of_rank(shape, rank, 1) for rank in range(2) if not rank]
    per = shape[-2] // 2 * shape[-1]
    shards += [Shard(shape, 0, per, per), Shard(shape, per, shards[0].numel, per)][: len(shape) - 1]
    shards = [s for s in shards if s.holds_rows]
    generator = torch.Generator().manual_seed(0)
    gs = [torch.randn(len(s), generator=generator).to(dtype) for s in shards]
    for batch, runs in [(ops.Batch([s]), ops.Runs([g])) for s, g in zip(shards, gs, strict=True)]:
        (shard,), (g,) = batch.shards, runs.tensors
        col = torch.rand(shard.mats, 1, shard.cols, generator=generator) + 0.1
        whole = ops.unit_quotient(ops.Scaled(g, 0.5, 0.7), shard, g)
        whole = ops.normalize_columns(whole, col.squeeze(1), 1e-8, shard)
        made = ops.unit_quotient(ops.Scaled(runs, 0.5, 0.7), batch, g)
        made = ops.normalize_columns(made, col.view(-1), 1e-8, batch)
        assert torch.allclose(made.col.values, whole.col.view(-1), rtol=1e-6)
        whole, sums = ops.normalize_whole_rows(whole, 1e-8, shard, g)
        made, own = ops.normalize_whole_rows(made, 1e-8, batch, g)
        assert torch.allclose(made.row.values, whole.row.view(-1), rtol=1e-5)
        assert torch.allclose(own, sums.view(-1), rtol=1e-5)


def test_momentum_saved_and_loaded_goes_on_bit_for_bit():
    before, grads = table.weights(SHAPES, torch.float32), table.gradients(6, SHAPES, torch.float32)

    def after(steps, saved=None, start=before):
        weights = [p.clone().requires_grad_() for p in start]
        optimizer = ds_ext.SCALE(weights, lr=0.05, momentum=0.9)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for gs in steps:
            for p, g in zip(weights, gs, strict=True):
                p.grad = g.clone()
            optimizer.step()
        return [p.detach() for p in weights], optimizer.state_dict()

    whole, _ = after(grads)
    half, saved = after(grads[:3])
    assert all(map(torch.equal, whole, after(grads[3:], saved, half)[0]))
    assert not any(map(torch.equal, whole[1:], after(grads[3:], None, half)[0][1:]))


def test_nothing_is_kept_but_the_momentum_of_the_head():
    shard = Shard.of_rank((64, 32), 0, 4)
    assert rules.SinkGD().keeps(shard) == rules.SCALE().keeps(shard) == {}
    assert set(rules.SCALE(momentum=0.9).keeps(shard)) == {"m"}


def test_ill_values_are_refused():
    with pytest.raises(ValueError, match=r"params.norm_axis is 'col'; allowed: \"row\" or \"col"):
        ds_ext.SCALE([torch.zeros(2, 2)], norm_axis="col")
    with pytest.raises(ValueError, match=r"params.iterations is 0; allowed: a whole number > 0"):
        ds_ext.SinkGD([torch.zeros(2, 2)], iterations=0)
