"""``fuse_into_backward`` in one process: the same bits as an ordinary step, and what it refuses.

Errors and warnings name arguments and calls, not keys of a DeepSpeed config.
"""

import copy
import itertools
import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ds_ext
from ds_ext.backward import owners
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from tests.common import by_role, fused_losses, models, updates
from tests.common.choose import paired, spread
from tests.common.hypers import FOR_ALL, NEEDED, changed
from tests.common.plain import mean_step, weights
from tests.common.states import same

HYPERS = changed(NEEDED, galoreadamw={"rank": 4})
WAYS = list(itertools.product([None, "reentrant", "nonreentrant"], [None, 300, 10**6]))


def optimizer_of(name, model):
    return by_role.made(name, model, HYPERS[name])


@pytest.mark.supports(
    lambda checkpointing: {
        None: "tied, shared, unused weights; 0 to 4 dimensions",
        "reentrant": "reentrant activation checkpointing",
        "nonreentrant": "non-reentrant activation checkpointing",
    }[checkpointing],
    stage=None,
    optimizer="name",
)
@pytest.mark.parametrize("name, checkpointing, bucket", paired(REGISTRY, WAYS))
def test_the_weights_have_the_bits_of_an_ordinary_step(name, checkpointing, bucket):
    plain, model = models.make(checkpointing), models.make(checkpointing)
    ordinary, optimizer = optimizer_of(name, plain), optimizer_of(name, model)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=bucket)
    for step in range(4):
        tokens = models.batch(step, 1)[0]
        norm = mean_step(ordinary, [plain(tokens, step=step)])
        model(tokens, step=step).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert fused.norm == pytest.approx(norm, rel=1e-5)
    assert same(weights(model), weights(plain))


def two_losses(model):
    """Two losses of one forward pass, and its input."""
    x = torch.randn(5, 6, requires_grad=True)
    h = model[:2](x)
    return model[2](h).square().sum(), model[3](h).square().sum(), x


SECOND = {
    "backward": lambda loss, x: loss.backward(),
    "grad": lambda loss, x: torch.autograd.grad(outputs=[loss], inputs=x),
}


@pytest.mark.parametrize("second", SECOND)
def test_a_second_backward_of_one_forward_is_refused_as_such(second):
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(6, 9), linear(9, 9), linear(9, 4), linear(9, 3))
    ds_ext.fuse_into_backward(model, optimizer_of("lomo", model), bucket_size=1)
    loss, other, x = two_losses(model)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second gradient.*before optimizer.step\(\)"):
        SECOND[second](other, x)
    plain = copy.deepcopy(model)  # in the middle of a step of another model, torch speaks
    loss, other, x = two_losses(plain)
    plain[1].weight.data.zero_()
    with torch.no_grad():
        plain[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        SECOND[second](other, x)


def noisy(model, tokens):
    """A loss whose forward and backward pass draw random numbers."""
    h = torch.tanh(model.up(model.embed(tokens)))
    h.register_hook(lambda g: g * torch.rand_like(g))
    return model.down(F.dropout(h, 0.3)).square().mean()


@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_both_backward_passes_see_the_same_random_numbers(policy):
    plain, model = models.make(), models.make()
    ordinary, optimizer = optimizer_of("lomo", plain), optimizer_of("lomo", model)
    fused = ds_ext.fuse_into_backward(model, optimizer, max_grad_norm=1e-3, gradient_policy=policy)
    for step in range(3):
        tokens = models.batch(step, 1)[0]
        torch.manual_seed(step)
        norm = mean_step(ordinary, [noisy(plain, tokens)], 1e-3)
        after = torch.rand(1)
        torch.manual_seed(step)
        fused.backward(noisy(model, tokens))
        optimizer.step()
        assert torch.equal(torch.rand(1), after)  # and the script's numbers are not disturbed
        assert fused.norm == pytest.approx(norm, rel=1e-5) and fused.norm > 1e-3
    updates.check_each(weights(model), weights(plain), weights(models.make()), steps=3)


@pytest.mark.parametrize(
    "name, how", spread(FOR_ALL, [({"max_grad_norm": 0.1},), ({"gradient_policy": "sharded"},)])
)
def test_a_step_that_is_measured_or_kept_is_skipped_whole(name, how, caplog):
    model, twin = models.make(), models.make()
    optimizer, other = optimizer_of(name, model), optimizer_of(name, twin)
    fused = ds_ext.fuse_into_backward(model, optimizer, **how)
    without = ds_ext.fuse_into_backward(twin, other, **how)
    for step in range(4):
        loss = model(models.batch(step, 1)[0], step=step)
        if step == 2:  # one element of one gradient is not finite
            before = weights(model)
            mask = torch.zeros_like(model.up.weight)
            mask[0, 0] = torch.inf
            fused.backward(loss + (model.up.weight * mask).sum())
            optimizer.step()
            assert same(weights(model), before)
            continue
        fused.backward(loss)
        without.backward(twin(models.batch(step, 1)[0], step=step))
        optimizer.step()
        other.step()
    assert same(weights(model), weights(twin))
    assert fused.skipped_steps == 1 and fused.metrics["skipped_parameters"] == 0
    assert "up.weight" in caplog.text and "the step is skipped" in caplog.text


def test_the_norm_of_the_step_before_is_never_one_that_is_not_finite():
    model = models.make()
    optimizer = optimizer_of("lomo", model)
    fused = ds_ext.fuse_into_backward(model, optimizer, max_grad_norm=0.1, clip_mode="previous")
    fused.backward(model(models.batch(0, 1)[0]))
    optimizer.step()
    known = fused.norm
    model(models.batch(1, 1)[0]).mul(torch.inf).backward()  # needs no measuring any more
    optimizer.step()
    assert fused.metrics["skipped_parameters"] > 0 and fused.clipping.previous_norm == known
    fused.backward(model(models.batch(2, 1)[0]))
    optimizer.step()
    assert fused.metrics["clip_coefficient"] == pytest.approx(0.1 / known, rel=1e-4)


def test_kept_gradients_are_in_fp32_and_gone_after_the_step_and_the_log_tells_their_cost(caplog):
    caplog.set_level(logging.INFO)
    model = models.make().bfloat16()
    optimizer = optimizer_of("adalomo", model)
    fused = ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded")
    for part in range(2):
        model(models.batch(part, 1)[0]).backward()
    kept = fused.state.kept
    used = [p for n, p in model.named_parameters() if not n.startswith(("frozen", "unused", "odd"))]
    assert set(kept) == set(used) and all(run.g.dtype == torch.float32 for run in kept.values())
    assert sum(run.g.numel() for run in kept.values()) == sum(p.numel() for p in used)
    optimizer.step()
    assert not fused.state.kept
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    told = f"gradients are kept until the step: {4 * trained / 2**20:,.1f} MiB on this rank"
    assert told in caplog.text


def test_an_optimizer_over_parameters_outside_the_model_is_refused():
    model, other = models.make(), torch.nn.Linear(2, 2)
    optimizer = OPTIMIZERS["lomo"]([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match="2 of the optimizer's parameters are not in the model"):
        ds_ext.fuse_into_backward(model, optimizer)


@pytest.mark.parametrize(
    "how",
    [
        *({"gradient_policy": policy} for policy in ("keep", None)),
        *({"bucket_size": size} for size in (True, -1, 1.5)),
        *({"max_grad_norm": norm} for norm in (True, -1.0, "1", None, float("nan"))),
        {"group": 1.0},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_changes(how):
    model = models.make()
    with pytest.raises((ValueError, TypeError), match="|".join(how)):
        ds_ext.fuse_into_backward(model, optimizer_of("lomo", model), **how)
    ds_ext.fuse_into_backward(model, optimizer_of("adalomo", model))


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
def test_backward_passes_add_up_though_autograd_lets_gradients_share_memory(checkpointing):
    plain, model = models.make(), models.make(checkpointing)
    ordinary, optimizer = optimizer_of("lomo", plain), optimizer_of("lomo", model)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded")
    for step in range(3):
        ordinary.zero_grad()
        sum(plain(models.batch(10 * step + part, 1)[0], step=step) for part in range(3)).backward()
        ordinary.step()
        for part in range(3):
            model(models.batch(10 * step + part, 1)[0], step=step).backward()
        optimizer.step()
    updates.check_each(weights(model), weights(plain), weights(models.make()), close=1e-4)


def test_an_optimizer_of_others_is_a_type_error():
    layer = torch.nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    with pytest.raises(TypeError, match="torch.optim.adamw.AdamW'>. Only optimizers of ds_ext"):
        ds_ext.fuse_into_backward(layer, torch.optim.AdamW(layer.parameters()))
    with pytest.raises(TypeError, match="'ds_ext.AdaLomo'>; .* nn.Module. The two are swapped."):
        ds_ext.fuse_into_backward(ds_ext.AdaLomo(layer.parameters()), layer)
    with pytest.raises(TypeError, match="allowed: a process group that has this rank, or None"):
        ds_ext.fuse_into_backward(layer, ds_ext.AdaLomo(layer.parameters()), "sharded")
    assert torch.equal(layer.weight, before) and not layer._forward_pre_hooks


def test_a_loss_that_is_no_tensor_is_refused():
    layer = torch.nn.Linear(2, 2)
    fused = ds_ext.fuse_into_backward(layer, ds_ext.AdaLomo(layer.parameters()))
    with pytest.raises(TypeError, match="backward takes the loss, a tensor of one number, not"):
        fused.backward((layer(torch.ones(2)).sum(),))


def test_a_launcher_without_a_process_group_is_refused(monkeypatch):
    model = torch.nn.Linear(4, 3)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=1e-3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first, or unset WORLD_SIZE"):
        ds_ext.fuse_into_backward(model, optimizer)
    monkeypatch.setenv("WORLD_SIZE", "1")
    ds_ext.fuse_into_backward(model, optimizer)


def test_no_parameters_to_train_is_one_sentence():
    frozen = torch.nn.Linear(4, 3).requires_grad_(False)
    trained = (p for p in frozen.parameters() if p.requires_grad)
    for make in (ds_ext.AdaLomo.for_model, lambda _: ds_ext.AdaLomo(trained)):
        with pytest.raises(ValueError, match="an empty parameter list. If all parameters of"):
            make(frozen)
    with pytest.raises(TypeError, match="should be an iterable"):  # torch's
        ds_ext.AdaLomo(torch.zeros(2))


def test_a_weight_that_is_frozen_after_forward_is_not_stepped():
    layer = nn.Linear(3, 2)
    optimizer = ds_ext.AdamW(layer.parameters(), weight_decay=0.1)
    ds_ext.fuse_into_backward(layer, optimizer)
    before, loss = [p.clone() for p in layer.parameters()], layer(torch.ones(1, 3)).sum()
    layer.weight.requires_grad_(False)
    loss.backward()
    optimizer.step()
    assert [*map(torch.equal, layer.parameters(), before)] == [True, False]


def test_parameters_that_were_put_into_a_group_count_as_trained():
    model = torch.nn.Linear(4, 3)
    optimizer = ds_ext.AdamW([torch.nn.Parameter(torch.zeros(2), requires_grad=False)])
    optimizer.param_groups[0]["params"] = list(model.parameters())
    ds_ext.fuse_into_backward(model, optimizer)


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
    model, _, step = fused(max_grad_norm=1.0)
    try:
        loss(model).backward()
    finally:  # nothing has moved
        assert same(weights(model), weights(net())) and step.norm is None


def cannot_repeat():
    model, _, step = fused(fused_losses.make("saved", factor=2.0), max_grad_norm=1.0)
    step.backward(model(*fused_losses.batch(0)))


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
        ["max_grad_norm needs the norm", ".backward(loss) on the object that fuse", "sharded"],
    ),
    "cannot repeat": (cannot_repeat, ["max_grad_norm: ", "or max_grad_norm=0"]),
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
