"""Errors and warnings in plain PyTorch name arguments and calls, not keys of a DeepSpeed config."""

import logging
import re

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.backward import owners
from tests.common import fused_losses

JSON = re.compile(
    r"engine|\"ds_ext\"|ds_ext\.(clip|grad)|gradient_clipping|optimizer\.params|config"
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def fused(model=None, **how):
    model = net() if model is None else model
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    return model, optimizer, ds_ext.fuse_into_backward(model, optimizer, **how)


def loss(model):
    return model(torch.ones(2, 4)).square().mean()


def twice(**how):
    """A second backward pass before the step."""
    model, _, step = fused(**how)
    for _ in range(2):
        step.backward(loss(model))


def not_measured():
    model, *_ = fused(max_grad_norm=1.0)
    loss(model).backward()


def cannot_repeat():
    model, _, step = fused(fused_losses.make("saved", factor=2.0), max_grad_norm=1.0)
    step.backward(model(*fused_losses.batch(0)))


def clipped_by_torch():
    model, *_ = fused()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


TOLD = {
    "clip mode": (lambda: fused(clip_mode="previos"), ["clip_mode is 'previos'"]),
    "clip mode without a norm": (
        lambda: fused(clip_mode="previous"),
        ['clip_mode = "previous" needs max_grad_norm > 0'],
    ),
    "clip mode of kept": (
        lambda: fused(clip_mode="previous", max_grad_norm=1.0, gradient_policy="sharded"),
        ['clip_mode = "previous"', 'gradient_policy is "sharded"'],
    ),
    "both clippings": (
        lambda: fused(max_grad_norm=1.0, clip_value=1.0),
        ["max_grad_norm = 1.0 and clip_value = 1.0"],
    ),
    "second gradient": (twice, ["before optimizer.step()", 'gradient_policy="sharded"']),
    "second gradient, measured": (
        lambda: twice(max_grad_norm=1.0, bucket_size=10**6),
        ["max_grad_norm", "optimizer.step()"],
    ),
    "not measured": (
        not_measured,
        ["max_grad_norm needs the norm", ".backward(loss) on the object that fuse"],
    ),
    "cannot repeat": (cannot_repeat, ["max_grad_norm: ", "or max_grad_norm=0"]),
    "torch's clipping": (clipped_by_torch, ["fuse_into_backward(..., max_grad_norm=...)"]),
    "value": (
        lambda: ds_ext.AdaLomo(net().parameters(), lr=-1.0),
        ["AdaLomo: lr is -1.0; allowed"],
    ),
    "several values": (
        lambda: ds_ext.LAMB(net().parameters(), min_coeff=2.0, max_coeff=1.0),
        ["LAMB: min_coeff"],
    ),
    "for_model's keys": (
        lambda: ds_ext.AdaLomo.for_model(net(), param_groups=[{"match": "0", "lrr": 1.0}]),
        ["unknown key param_groups[0].lrr."],
    ),
    "for_model's targets": (
        lambda: ds_ext.APOLLO.for_model(net(), target_modules=["nobody"]),
        ["APOLLO: target_modules: 'nobody' matches no trained matrix."],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_errors_name_what_was_written(name):
    action, words = TOLD[name]
    others = owners.all_owners()  # engines that an earlier test has left
    with pytest.raises((ValueError, RuntimeError)) as caught:
        try:
            action()
        finally:
            for owner in owners.all_owners():
                if owner not in others:
                    owner.give_way()
    told = str(caught.value)
    assert all(word in told for word in words), told
    assert not JSON.search(told), told


def test_warnings_name_what_can_be_written(caplog):
    model = net()
    nn.init.zeros_(model[1].weight)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=1e-5)
    with caplog.at_level(logging.WARNING, logger="ds_ext"):
        ds_ext.fuse_into_backward(model, optimizer)
        loss(model).backward()
        model.zero_grad()
    small, zeros, discarded = (record.getMessage() for record in caplog.records)
    assert "lr = 1e-05 is small" in small and "auto" not in small
    assert 'ds_ext.AdaLomo.for_model(model, param_groups=[{"match": "1.weight"' in zeros
    assert discarded.endswith('gradient_policy="sharded" of fuse_into_backward.')
    assert not any(JSON.search(record.getMessage()) for record in caplog.records)
