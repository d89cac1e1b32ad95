"""zero_grad() and load_state_dict() before the step, without an engine."""

import copy
import logging

import pytest
import torch
from torch import nn

import ds_ext
from tests.common import skipped_batches

LR = 0.1


def start(policy: str, bucket_size: int = 70) -> tuple[nn.Module, ds_ext.LOMO]:
    model = skipped_batches.make()
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=bucket_size, gradient_policy=policy)
    return model, optimizer


def moved(model: nn.Module, optimizer: ds_ext.LOMO) -> list[torch.Tensor]:
    """What a step does to each parameter."""
    before = [p.detach().clone() for p in model.parameters()]
    model(skipped_batches.batch(1, 0)).backward()
    optimizer.step()
    return [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]


def expected(model: nn.Module) -> list[torch.Tensor]:
    """The same by plain SGD, without checkpointing, which autograd.grad does not go through."""
    plain = skipped_batches.Twice()
    plain.load_state_dict(model.state_dict())
    h = torch.tanh(plain.first(skipped_batches.batch(1, 0)))
    loss = plain.last(plain.segment(plain.segment(h))).square().sum()
    return [-LR * g for g in torch.autograd.grad(loss, list(plain.parameters()))]


def assert_close(model: nn.Module, updates: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for p, got, update in zip(model.parameters(), updates, wanted, strict=True):
        assert (got - update).norm() <= 1e-5 * update.norm() + 2**-23 * p.norm()


@pytest.mark.parametrize("how", skipped_batches.HOW)
@pytest.mark.parametrize("policy", ["fused", "sharded"])
@pytest.mark.parametrize("bucket_size", [1, 70, 10**6])
def test_a_skipped_batch_leaves_no_trace(policy, how, bucket_size):
    model, optimizer = start(policy, bucket_size)
    whole = [p.detach().clone() for p in model.parameters()]
    for zero_grad in (optimizer.zero_grad, model.zero_grad):
        skipped_batches.skip(model, torch.Tensor.backward, zero_grad, how, 0)
        if policy == "sharded" or how.endswith("forward") or bucket_size == 10**6:
            assert all(map(torch.equal, model.parameters(), whole))  # nothing was stepped
        wanted = expected(model)
        assert_close(model, moved(model, optimizer), wanted)
        whole = [p.detach().clone() for p in model.parameters()]


def test_what_was_stepped_stays_and_a_warning_says_so(caplog):
    model, optimizer = start("fused", bucket_size=1)
    skipped_batches.skip(model, torch.Tensor.backward, lambda: None, "failed backward", 0)
    with caplog.at_level(logging.WARNING, "ds_ext"):
        optimizer.zero_grad()
        optimizer.zero_grad()
    (message,) = (record.getMessage() for record in caplog.records)
    assert "already updated 2 of 6 parameters" in message and "sharded" in message


def test_a_part_of_the_model_may_be_discarded_alone():
    model, optimizer = start("sharded")
    wanted = expected(model)
    model(skipped_batches.batch(7, 0)).backward()
    model.last.zero_grad()
    skipped_batches.skip(model, torch.Tensor.backward, model.first.zero_grad, "forward", 0)
    model.middle.zero_grad()
    assert_close(model, moved(model, optimizer), wanted)


def test_a_state_that_is_loaded_before_the_step_steps_kept_gradients_and_warns_of_used_ones(caplog):
    stepped = []
    for policy in ("plain", "sharded", "fused"):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        with torch.no_grad():
            for i, p in enumerate(model.parameters(), 1):
                p.copy_(torch.arange(p.numel()).view_as(p).sin() / i)
        optimizer = ds_ext.AdamW(model.parameters(), lr=LR)
        if policy != "plain":
            ds_ext.fuse_into_backward(model, optimizer, bucket_size=1, gradient_policy=policy)
        x = torch.linspace(-1, 1, 15).view(3, 5)
        saved = []
        for scale in (1, 2):
            model(scale * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.append(copy.deepcopy(optimizer.state_dict()))
        model(3 * x).square().sum().backward()
        with caplog.at_level(logging.WARNING, "ds_ext"):
            optimizer.load_state_dict(saved[0])
        optimizer.step()
        stepped.append([p.detach() for p in model.parameters()])
        assert len(caplog.records) == (policy == "fused")
        optimizer.load_state_dict(saved[0])
    assert all(map(torch.equal, *stepped[:2])) and len(caplog.records) == 1
    assert "backward has already updated parameters" in caplog.text
