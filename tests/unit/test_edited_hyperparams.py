"""Hyper-parameters that a scheduler or a user sets in ``param_groups`` are checked, too."""

import math

import numpy
import pytest
import torch

import ds_ext

OPTIMIZERS = [ds_ext.LOMO, ds_ext.AdaLomo, ds_ext.Adafactor, ds_ext.CAME, ds_ext.LAMB]
OPTIMIZERS += [ds_ext.GaLoreAdamW, ds_ext.AdamW, ds_ext.SCALE, ds_ext.SinkGD]
OPTIMIZERS += [ds_ext.FlashAdamW, ds_ext.Lion]
WRONG = [("lr", math.nan, "nan"), ("lr", -1e-3, "-0.001"), ("lr", "1e-3", "'1e-3'")]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))


def two_groups(kind, model):
    return kind([{"params": list(layer.parameters())} for layer in model])


def unchanged(model):
    return all(map(torch.equal, model.parameters(), network().parameters()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("key, value, shown", WRONG)
def test_a_plain_step_refuses_what_was_set_before_any_weight_moves(kind, key, value, shown):
    model = network()
    optimizer = two_groups(kind, model)
    model(torch.ones(2, 5)).sum().backward()
    before, optimizer.param_groups[1][key] = optimizer.param_groups[1][key], value
    with pytest.raises(ValueError, match=rf"param_groups\[1\]\.{key} is {shown}; allowed: a numb"):
        optimizer.step()
    assert unchanged(model)
    optimizer.param_groups[1][key] = before
    optimizer.step()
    assert not unchanged(model)


def test_the_number_of_betas_is_checked():
    model = network()
    optimizer = two_groups(ds_ext.LAMB, model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises(ValueError, match=r"betas is \(0.9,\); allowed: a list of 2"):
        optimizer.step()
    assert unchanged(model)


@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_backward_refuses_what_was_set_before_any_weight_moves(policy):
    model = network()
    optimizer = two_groups(ds_ext.AdaLomo, model)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy=policy)
    optimizer.param_groups[0]["lr"] = math.nan  # of the layer whose gradient comes last
    with pytest.raises(ValueError, match=r"param_groups\[0\].lr is nan"):
        model(torch.ones(2, 5)).sum().backward()
    assert unchanged(model)


def test_kept_gradients_are_not_stepped_by_what_is_set_after_backward():
    model = network()
    optimizer = two_groups(ds_ext.AdaLomo, model)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded")
    model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"param_groups\[1\].lr is -1.0"):
        optimizer.step()
    assert unchanged(model)


@pytest.mark.parametrize("value", [numpy.float32(0.25), numpy.float64(0.25), torch.tensor(0.25)])
def test_scalars_of_numpy_and_torch_are_numbers(value):
    stepped = []
    for lr in (0.25, value):
        model = network()
        optimizer = two_groups(ds_ext.AdaLomo, model)
        model(torch.ones(2, 5)).sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        stepped.append(model)
    assert all(map(torch.equal, *(model.parameters() for model in stepped)))


def test_a_tensor_that_is_a_rate_is_read_at_each_step():
    found = []
    for made in (ds_ext.LOMO, torch.optim.SGD):
        torch.manual_seed(0)
        rate, model = torch.tensor(0.5), network()
        first, *others = model.parameters()
        optimizer = made([first], lr=rate)
        optimizer.add_param_group({"params": others})
        for lr in (0.5, 0.125):
            rate.fill_(lr)
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
        assert all(group["lr"] is rate for group in optimizer.param_groups)
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("betas", [torch.tensor([0.5, 0.75]), numpy.array([0.5, 0.75])])
def test_tensors_and_arrays_of_several_numbers_are_lists(betas):
    stepped = []
    for made, changed in (((0.5, 0.75), None), (betas, None), ((0.9, 0.99), betas)):
        model = network()
        optimizer = ds_ext.AdamW(model.parameters(), betas=made)
        if changed is not None:
            optimizer.param_groups[0]["betas"] = changed
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        stepped.append(list(model.parameters()))
    for others in stepped[1:]:
        assert all(map(torch.equal, stepped[0], others))
    with pytest.raises(ValueError, match=r"betas is .*; allowed: a list of 2"):
        ds_ext.AdamW(model.parameters(), betas=torch.tensor([0.5, 0.75, 0.75]))


def test_a_rule_is_made_anew_only_when_its_group_has_changed():
    model = network()
    optimizer = two_groups(ds_ext.LAMB, model)
    first, last = model[0].weight, model[1].weight
    rule, other = optimizer.rule_of(first), optimizer.rule_of(last)
    assert optimizer.rule_of(first) is rule
    betas = [0.5, 0.6]
    optimizer.param_groups[0]["betas"] = betas
    assert optimizer.rule_of(first).betas == (0.5, 0.6)
    betas[0] = 0.7  # in place
    assert optimizer.rule_of(first).betas == (0.7, 0.6)
    assert optimizer.rule_of(last) is other
