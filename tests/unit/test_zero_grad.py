"""zero_grad() and load_state_dict() before the step, without an engine; more: tests/scenarios."""

import copy
import logging

import pytest
import torch
from torch import nn

import ds_ext

X = torch.linspace(-1, 1, 15).view(3, 5)


def start(policy: str, kind: type = ds_ext.LOMO) -> tuple[nn.Module, ds_ext.LOMO]:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    with torch.no_grad():
        for i, p in enumerate(model.parameters(), 1):
            p.copy_(torch.arange(p.numel()).view_as(p).sin() / i)
    optimizer = kind(model.parameters(), lr=0.1)
    if policy != "plain":
        ds_ext.fuse_into_backward(
            model, optimizer, bucket_size={"fused": 1}.get(policy, 70), gradient_policy=policy
        )
    return model, optimizer


def train(model: nn.Module, optimizer: ds_ext.LOMO, scale: float) -> None:
    model(scale * X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fail(grad: torch.Tensor) -> None:
    raise InterruptedError


def test_what_was_stepped_stays_and_a_warning_says_so(caplog):
    model, optimizer = start("fused")
    h = model[0](X)
    h.register_hook(fail)
    with pytest.raises(InterruptedError):
        model[1](h).square().sum().backward()
    with caplog.at_level(logging.WARNING, "ds_ext"):
        optimizer.zero_grad()
        optimizer.zero_grad()
    (message,) = (record.getMessage() for record in caplog.records)
    assert "already updated 2 of 4 parameters" in message and "sharded" in message


def test_a_part_of_the_model_may_be_discarded_alone():
    (model, optimizer), (plain, its_own) = start("sharded"), start("plain")
    model(7 * X).square().sum().backward()
    model[1].zero_grad()
    model(5 * X)
    model[0].zero_grad()
    train(model, optimizer, 0.5)
    train(plain, its_own, 0.5)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_state_that_is_loaded_before_the_step_steps_kept_gradients_and_warns_of_used_ones(caplog):
    stepped = []
    for policy in ("plain", "sharded", "fused"):
        model, optimizer = start(policy, ds_ext.AdamW)
        train(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 2)
        model(3 * X).square().sum().backward()
        with caplog.at_level(logging.WARNING, "ds_ext"):
            optimizer.load_state_dict(saved)
        optimizer.step()
        stepped.append([p.detach() for p in model.parameters()])
        assert len(caplog.records) == (policy == "fused")
        optimizer.load_state_dict(saved)
    assert all(map(torch.equal, *stepped[:2])) and len(caplog.records) == 1
    assert "backward has already updated parameters" in caplog.text
