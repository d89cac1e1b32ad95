"""Gradients that are kept projected, on simulated ranks and in one process."""

import copy
import gc
import logging
import math

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.backward import projected_grads
from ds_ext.distributed import lockstep
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules.galore import GaLoreAdamW
from tests.common import accumulated
from tests.common.choose import params
from tests.common.simulated import EXACT, Ranks, cut, errors

SHAPES = ((13, 29), (29, 13), (16, 16), (64, 33), (1, 7), (3, 5))
RANK, GAP, STEPS, PASSES = 3, 2, 5, 3
HYPERS = {"lr": 0.05, "scale": 0.5, "weight_decay": 0.1}


def matrix(shape, seed):
    """A matrix whose singular values are well apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return u @ torch.diag(1.5 ** -torch.arange(len(s)).double()) @ v


def gradients(shape):
    """By step and micro-batch."""
    n = 1000 * sum(shape)
    return [[matrix(shape, n + PASSES * t + i) for i in range(PASSES)] for t in range(STEPS)]


def trained(shape, world):
    """The weight after all steps on simulated ranks, and the elements that each has kept."""
    rule = GaLoreAdamW(rank=RANK, update_proj_gap=GAP, **HYPERS)
    ranks = Ranks(rule, [matrix(shape, 1)], world)
    key, kept = ranks.runs[0][0], []
    for t, micro in enumerate(gradients(shape), 1):
        kept, steps = [{} for _ in range(world)], []
        for (state,) in ranks.states:
            state["step"] = t - 1
        of_ranks = [
            (*(x for (x,) in rank), own)
            for *rank, own in zip(ranks.runs, ranks.states, ranks.shards, kept, strict=True)
        ]
        for g in micro:
            begun = []
            for p, state, shard, own in of_ranks:
                update = RunUpdate(key, p, cut(g, shard), shard)
                begun.append([*projected_grads.accumulate(rule, update, state, None, own, None)])
            lockstep.simulate(begun)
        for p, state, shard, own in of_ranks:
            steps.append([rule.step(p, own[key].parts[0], state, t, shard)])
        lockstep.simulate(steps)
    return ranks.params[0], [own[key].parts[0].values.numel() for own in kept]


@pytest.mark.parametrize("world", params([1, 2, 3, 7, 16], [1, 3]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_simulated_ranks_take_the_textbooks_step(shape, world):
    got, elements = trained(shape, world)
    rank = min(RANK, *shape)
    expected = accumulated.textbook(matrix(shape, 1), gradients(shape), rank, GAP, **HYPERS)
    assert max(errors([got], [expected], [matrix(shape, 1)])) <= EXACT
    assert sum(elements) == rank * max(shape)  # each number is kept once
    size = -(-shape[0] * shape[1] // world)
    assert max(elements) <= 1 + rank * max(shape) * size / (shape[0] * shape[1])


def model(bias=True):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40, bias), nn.Tanh(), nn.Linear(40, 12, bias))


def batch(number):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(number))


def fit(policy, passes, steps=5, gap=GAP, made=None, **how):
    """A model trained in one process, and what steps it."""
    own = model() if made is None else made
    optimizer = ds_ext.GaLoreAdamW(own.parameters(), lr=1e-2, rank=4, update_proj_gap=gap)
    fused = ds_ext.fuse_into_backward(own, optimizer, gradient_policy=policy, **how)
    for step in range(steps):
        for i in range(passes):
            (own(batch(step * passes + i)).square().mean() / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return own, fused


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_one_micro_batch_has_the_bits_of_kept_gradients():
    projected, whole = fit("projected", 1)[0], fit("sharded", 1)[0]
    assert torch.equal(weights(projected), weights(whole))


def live_elements():
    gc.collect()
    return sum(x.numel() for x in gc.get_objects() if type(x) is torch.Tensor)


def test_only_projections_live_between_micro_batches(caplog):
    def kept(policy):
        own, _ = fit(policy, 1, steps=1, made=model(bias=False))  # with states
        before = live_elements()
        own(batch(0)).square().mean().backward()
        return live_elements() - before

    assert kept("sharded") == 24 * 40 + 40 * 12
    assert kept("projected") == 4 * 40 + 4 * 40
    with caplog.at_level(logging.INFO, "ds_ext"):
        fit("projected", 1, steps=1, made=model(bias=False))
    assert f"{4 * 320 / 2**20:,.1f} MiB" in caplog.text


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_skips_the_step_and_leaves_no_trace(bad, first):
    own, fused = fit("projected", 2, steps=1, gap=1)
    before, state = weights(own), fused.optimizer.state_dict()["state"]
    moments = {k: s["m"].clone() for k, s in state.items()}
    for i in range(2):
        x = batch(7) if (i == 0) != first else batch(7) * bad
        own(x).square().mean().backward()
    fused.optimizer.step()
    assert torch.equal(weights(own), before) and fused.skipped_steps == 1
    after = fused.optimizer.state_dict()["state"]
    assert all(torch.equal(after[k]["m"], m) for k, m in moments.items())
    assert {s["step"] for s in after.values()} == {1}
    own(batch(9)).square().mean().backward()
    fused.optimizer.step()
    assert not torch.equal(weights(own), before)


def test_a_discarded_first_step_leaves_no_state():
    own, fused = fit("projected", 1, steps=0)
    own(batch(0)).square().mean().backward()
    assert any("q" in s for s in fused.optimizer.state.values())
    fused.optimizer.zero_grad()
    assert not any(fused.optimizer.state.values())
    own(batch(0)).square().mean().backward()
    fused.optimizer.step()
    other = fit("projected", 1, steps=1)[0]
    assert torch.equal(weights(own), weights(other))


def test_a_bad_gradient_of_several_micro_batches_is_counted_once(caplog):
    own, fused = fit("projected", 1, steps=0, made=model(bias=False))
    for _ in range(3):
        own(batch(0) * float("nan")).square().mean().backward()
    fused.optimizer.step()
    assert fused.metrics["skipped_parameters"] == 2 and fused.skipped_steps == 1
    assert not math.isfinite(fused.norm)
    assert caplog.text.count("0.weight") == 1


REPLACED = {
    "reload": lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "delete": lambda module, optimizer: optimizer.state.pop(module[2].weight),
    "double": lambda module, _: module.double(),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_a_projection_that_was_replaced_in_a_step_is_refused(replace, is_last):
    """The gradients so far were projected by the old one; zero_grad() drops them."""
    own, fused = fit("projected", 1, steps=1)

    def end_step():
        x = batch(1).to(own[0].weight.dtype)
        if not is_last:
            own(x).square().mean().backward()
        fused.optimizer.step()

    own(batch(0)).square().mean().backward()
    replace(own, fused.optimizer)
    before = weights(own)
    with pytest.raises(RuntimeError, match=r"state or the dtype of .*weight was replaced"):
        end_step()
    assert torch.equal(weights(own), before)
    fused.optimizer.zero_grad()
    own(batch(2).to(before.dtype)).square().mean().backward()
    fused.optimizer.step()
    assert not torch.equal(weights(own), before) and weights(own).isfinite().all()


def test_the_norm_is_of_the_projections():
    own, fused = fit("projected", 1, steps=0)
    own(batch(0)).square().mean().backward()
    plain, square = model(), 0.0
    plain(batch(0)).square().mean().backward()
    for p in plain.parameters():
        r = p.grad.double()
        if r.dim() == 2:
            q, right = accumulated.basis(r, 4)
            r = r @ q if right else q.T @ r
        square += float(r.square().sum())
    fused.optimizer.step()
    assert fused.norm == pytest.approx(square**0.5, rel=1e-5)


class Experts(nn.Module):
    """Two experts in one parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.num_experts = 2
        self.up = nn.Parameter(torch.randn(2, 24, 10))

    def forward(self, x):
        return torch.einsum("bi,eio->ebo", x, self.up)


def test_experts_are_projected_one_by_one():
    own = nn.ModuleDict({"experts": Experts()})
    before = own["experts"].up.detach().clone()
    optimizer = ds_ext.GaLoreAdamW(own.parameters(), lr=1e-2, rank=4, update_proj_gap=2)
    ds_ext.fuse_into_backward(own, optimizer, gradient_policy="projected")
    micro = []
    for step in range(3):
        micro.append([])
        for i in range(2):
            loss = own["experts"](batch(2 * step + i)).pow(3).mean()
            (g,) = torch.autograd.grad(loss, [own["experts"].up], retain_graph=True)
            micro[-1].append(g)
            loss.backward()
        optimizer.step()
    for e in range(2):
        steps = [[g[e] for g in some] for some in micro]
        expected = accumulated.textbook(before[e], steps, 4, 2, lr=1e-2)
        got = own["experts"].up[e]
        assert max(errors([got], [expected], [before[e]])) <= 1e-4


def test_what_cannot_be_honoured_is_refused():
    for how, words in (
        ({"max_grad_norm": 1.0}, "max_grad_norm=0"),
        ({"clip_value": 0.1}, "clip_value to 0"),
    ):
        with pytest.raises(ValueError, match=f'"projected" keeps projections.*set {words}, or'):
            fit("projected", 1, **how)
    for optimizer in (ds_ext.AdamW, ds_ext.APOLLO):
        own = model(bias=False)
        with pytest.raises(ValueError, match=f"{optimizer.__name__} has a step that needs only"):
            ds_ext.fuse_into_backward(
                own, optimizer(own.parameters(), lr=1e-3), gradient_policy="projected"
            )
