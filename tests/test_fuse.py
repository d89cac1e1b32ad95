"""``fuse_into_backward`` in one process: the same bits as an ordinary step, and what it refuses."""

import copy
import logging

import pytest
import torch

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests import models

HYPERS = {"adafactor": {"lr": 0.01, "relative_step": False}, "galoreadamw": {"rank": 4}}


def optimizer_of(name, model):
    return OPTIMIZERS[name](model.parameters(), **HYPERS.get(name, {"lr": 1e-3}))


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("bucket", [None, 300, 10**6])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_have_the_bits_of_an_ordinary_step(name, checkpointing, bucket):
    plain, model = models.make(checkpointing), models.make(checkpointing)
    ordinary, optimizer = optimizer_of(name, plain), optimizer_of(name, model)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=bucket)
    for step in range(4):
        tokens = models.batch(step, 1)[0]
        ordinary.zero_grad()
        plain(tokens, step=step).backward()
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        ordinary.step()
        model(tokens, step=step).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert fused.norm == pytest.approx(float(norm), rel=1e-5)
    expected = weights(plain)
    assert all(torch.equal(p, expected[n]) for n, p in weights(model).items())


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
def test_backward_alone_steps_all_but_weights_whose_gradient_comes_in_parts(checkpointing):
    model = models.make(checkpointing)
    optimizer = optimizer_of("lomo", model)
    ds_ext.fuse_into_backward(model, optimizer)
    before = weights(model)
    model(models.batch(0, 1)[0]).backward()
    moved = {n for n, p in weights(model).items() if not torch.equal(p, before[n])}
    still = {"shared.weight", "shared.bias"} if checkpointing == "reentrant" else set()
    still |= {n for n in before if n.startswith(("frozen", "unused", "odd"))}
    assert moved == set(before) - still
    optimizer.step()
    assert not torch.equal(model.shared.weight, before["shared.weight"])


def test_removing_gives_back_an_ordinary_optimizer():
    model = models.make()
    optimizer = optimizer_of("lomo", model)
    ds_ext.fuse_into_backward(model, optimizer).remove()
    before = weights(model)
    model(models.batch(0, 1)[0]).backward()
    assert model.up.weight.grad is not None
    assert torch.equal(model.up.weight, before["up.weight"])


def test_a_scheduler_is_followed():
    model, plain = models.make(), models.make()
    optimizers = [optimizer_of("lomo", m) for m in (model, plain)]
    ds_ext.fuse_into_backward(model, optimizers[0])
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for step in range(3):
        for m, o, s in zip((model, plain), optimizers, schedulers, strict=True):
            o.zero_grad()
            m(models.batch(step, 1)[0]).backward()
            o.step()
            s.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 / 8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e19])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_gradient_makes_a_weight_or_a_state_that_is_not_finite(name, value, caplog):
    model = torch.nn.Linear(64, 64, bias=False)
    other = torch.nn.Linear(64, 3)
    both = torch.nn.Sequential(model, other)
    optimizer = optimizer_of(name, both)
    fused = ds_ext.fuse_into_backward(both, optimizer)
    scale = torch.ones(64, 64)
    scale[3, 5] = value
    logging.getLogger("ds_ext").propagate = True
    before = weights(both)
    (both(torch.randn(5, 64)).square().sum() + (model.weight * scale).sum()).backward()
    optimizer.step()
    after = weights(both)
    assert torch.equal(after["0.weight"], before["0.weight"]) and fused.skipped == 1
    assert not optimizer.state[model.weight]
    assert not torch.equal(after["1.weight"], before["1.weight"])
    assert all(p.isfinite().all() for p in after.values())
    assert "0.weight" in caplog.text
    logging.getLogger("ds_ext").propagate = False


def test_a_second_backward_before_step_is_refused():
    model = models.make()
    ds_ext.fuse_into_backward(model, optimizer_of("adalomo", model))
    model(models.batch(0, 1)[0]).backward()
    with pytest.raises(RuntimeError, match="second gradient.*before"):
        model(models.batch(1, 1)[0]).backward()


def test_generation_between_steps_does_not_count_as_use():
    model, quiet = models.make(), models.make()
    for m in (model, quiet):
        optimizer = optimizer_of("adalomo", m)
        fused = ds_ext.fuse_into_backward(m, optimizer)
        if m is model:
            with torch.no_grad():
                for _ in range(3):
                    m(models.batch(5, 1)[0])
        loss = m(models.batch(0, 1)[0])
        assert {p.shape for p in fused.buckets.uses.count if fused.buckets.uses.count[p] > 1} == {
            m.shared.weight.shape,
            m.shared.bias.shape,
        }
        loss.backward()
        optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), quiet.parameters(), strict=True)
    )


def test_a_model_can_be_copied_before_it_is_fused():
    model = models.make()
    twin = copy.deepcopy(model)
    ds_ext.fuse_into_backward(model, optimizer_of("lomo", model))
    twin(models.batch(0, 1)[0]).backward()
    assert twin.up.weight.grad is not None
