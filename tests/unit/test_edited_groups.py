"""Edits of ``param_groups`` between steps, and of their hyper-parameters: followed, or refused.

That a step follows them as torch: tests/scenarios.
"""

import functools
import math

import numpy
import pytest
import torch

import ds_ext
from ds_ext.checkpoint import resharding
from tests.common import models, optimizer_ranks, table
from tests.common.ranks import logged

network = functools.partial(models.layers, 5, 6, 4, 3)


def groups_of(model):
    return [
        {"params": [*model[0].parameters(), model[2].weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [model[2].bias, *model[4].parameters()], "lr": 0.01},
    ]


def one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_kept_gradients_of_what_was_taken_out_before_the_step_are_dropped(policy):
    model = network()
    optimizer = ds_ext.AdamW(groups_of(model), lr=0.01)
    fused = ds_ext.fuse_into_backward(model, optimizer, gradient_policy=policy)
    model(torch.ones(2, 5)).square().sum().backward()
    taken = optimizer.param_groups[0]["params"].pop(0)
    optimizer.step()
    is_stepped = not torch.equal(taken, network()[0].weight)
    assert is_stepped == (policy == "fused")  # which has stepped it in backward
    del optimizer.param_groups[1]
    one_step(model, optimizer)
    assert fused.norm > 0


@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_an_edit_after_backward_has_stepped_is_told(policy):
    model = network()
    optimizer = ds_ext.AdaLomo(groups_of(model), lr=0.01)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy=policy)
    for is_edited in (False, True, False):
        model(torch.ones(2, 5)).square().sum().backward()
        if is_edited:
            optimizer.param_groups[1]["lr"] = 0.5
        with logged() as said:
            optimizer.step()
        told = [line for line in said if "param_groups were edited between backward" in line]
        assert len(told) == (is_edited and policy == "fused")


def test_metrics_tell_of_the_groups_that_were_stepped():
    model = network()
    named = [{**group, "name": name} for group, name in zip(groups_of(model), "ab", strict=True)]
    optimizer = ds_ext.AdaLomo(named, lr=0.01)
    fused = ds_ext.fuse_into_backward(model, optimizer, measure_updates=True)
    groups = optimizer.param_groups
    edits = [list, groups.reverse, list, groups.pop, list]  # pop takes "a" out, the last
    for edit, names in zip(edits, ["ab", "ab", "ba", None, "b"], strict=True):
        model(torch.ones(2, 5)).square().sum().backward()
        edit()
        optimizer.step()
        told = [key for key in fused.metrics if "update" in key]
        assert names is None or told == [f"update_rms/{name}" for name in names]
        model.zero_grad()


def test_stacks_of_experts_stay_stacks_when_groups_are_reordered():
    stack, matrix = (torch.nn.Parameter(torch.randn(2, 3, 4)) for _ in range(2))
    optimizer = ds_ext.AdaLomo([{"params": [stack]}, {"params": [matrix]}])
    optimizer.stacks = {stack: 0}
    optimizer.param_groups.reverse()
    optimizer.follow_groups()
    assert [*optimizer.stacks] == [stack]


def test_rounding_at_random_after_an_edit_is_that_of_an_optimizer_made_so():
    """Numbers of parameters, by which bits are drawn, are of the groups as they are now."""
    made = []
    for edits in (True, False):
        torch.manual_seed(0)
        a, b = (torch.nn.Parameter(torch.randn(40, 30).bfloat16()) for _ in range(2))
        optimizer = ds_ext.LOMO([a, b] if edits else [b], lr=1e-3)
        del optimizer.param_groups[0]["params"][: int(edits)]
        for p in (a, b):
            p.grad = torch.ones_like(p)
        optimizer.step()
        made.append(b)
    assert torch.equal(*made)


def complex_numbers(groups):
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    groups[0]["params"].append(p)


WRONG = [
    (
        lambda groups: groups[1]["params"].append(groups[0]["params"][0]),
        r"in param_groups\[0\] and in param_groups\[1\]",
    ),
    (
        lambda groups: groups.append({"params": groups.pop()["params"], "lr": 0.1}),
        r"param_groups\[1\] has no 'betas': .*add_param_group",
    ),
]
WRONG += [(complex_numbers, "is torch.complex64")]
WRONG += [
    (
        lambda groups, new={key: value}: groups[1].update(new),
        rf"param_groups\[1\]\.{key} is {shown}; allowed: a {kind}",
    )
    for key, value, shown, kind in (
        *(("lr", math.nan, "nan", "number"), ("lr", -1e-3, "-0.001", "number")),
        *(("lr", "1e-3", "'1e-3'", "number"), ("betas", (0.9,), r"\(0.9,\)", "list of 2")),
    )
]


@pytest.mark.parametrize("policy", [None, "fused", "sharded"])
@pytest.mark.parametrize("edit, words", WRONG)
def test_an_edit_that_cannot_be_followed_is_refused_before_any_weight_moves(edit, words, policy):
    model = network()
    optimizer = ds_ext.AdamW(groups_of(model), lr=0.01)
    if policy:
        ds_ext.fuse_into_backward(model, optimizer, gradient_policy=policy)
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    edit(optimizer.param_groups)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            one_step(model, optimizer)
        assert all(map(torch.equal, model.parameters(), network().parameters()))
    optimizer.param_groups[:] = groups
    model.zero_grad()
    one_step(model, optimizer)
    assert not any(map(torch.equal, model.parameters(), network().parameters()))


def test_kept_gradients_are_not_stepped_by_what_is_set_after_backward():
    model = network()
    optimizer = ds_ext.AdaLomo(model.parameters())
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded")
    model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"param_groups\[0\].lr is -1.0"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), network().parameters()))


NUMBERS = [("lr", 0.25, kind(0.25)) for kind in (numpy.float32, numpy.float64, torch.tensor)]
NUMBERS += [("betas", (0.5, 0.75), kind([0.5, 0.75])) for kind in (numpy.array, torch.tensor)]
NUMBERS += [("lr", 1.0, 1), ("betas", (0.0, 0.75), [0, 0.75])]


@pytest.mark.parametrize("key, number, value", NUMBERS)
def test_whole_numbers_lists_scalars_and_arrays_of_numpy_and_torch_are_numbers(key, number, value):
    stepped = []
    for given, changed in (({key: number}, {}), ({key: value}, {}), ({}, {key: value})):
        model = network()
        optimizer = ds_ext.AdamW(model.parameters(), **given)
        optimizer.param_groups[0].update(changed)
        one_step(model, optimizer)
        stepped.append([p.detach() for p in model.parameters()])
    for others in stepped[1:]:
        assert all(map(torch.equal, stepped[0], others))
    with pytest.raises(ValueError, match=rf"{key} is .*; allowed: a"):
        ds_ext.AdamW(model.parameters(), **{key: torch.tensor([0.5, 0.75, 0.75])})


def test_a_tensor_that_is_a_rate_is_read_at_each_step():
    found = []
    for made in (ds_ext.LOMO, torch.optim.SGD):
        rate, model = torch.tensor(0.5), network()
        first, *others = model.parameters()
        optimizer = made([first], lr=rate)
        optimizer.add_param_group({"params": others})
        for lr in (0.5, 0.125):
            rate.fill_(lr)
            one_step(model, optimizer)
        found.append([p.detach() for p in model.parameters()])
        assert all(group["lr"] is rate for group in optimizer.param_groups)
    torch.testing.assert_close(*found)


def test_a_rule_is_made_anew_only_when_its_group_has_changed():
    model = network()
    optimizer = ds_ext.AdamW(groups_of(model))
    first, last = model[0].weight, model[4].weight
    rule, other = optimizer.rule_of(first), optimizer.rule_of(last)
    assert optimizer.rule_of(first) is rule
    for kind in (list, numpy.array, torch.tensor):
        betas = kind([0.5, 0.625])
        optimizer.param_groups[0]["betas"] = betas
        assert optimizer.rule_of(first).betas == (0.5, 0.625)
        betas[0] = 0.75  # in place
        assert optimizer.rule_of(first).betas == (0.75, 0.625)
    assert optimizer.rule_of(last) is other
    optimizer.param_groups[0] = dict(optimizer.param_groups[0])  # equal, and another
    optimizer.follow_groups()
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.rule_of(first).lr == 0.5


def test_a_parameter_from_outside_a_fused_model_is_refused():
    model = network()
    optimizer = ds_ext.AdamW(groups_of(model), lr=0.01)
    ds_ext.fuse_into_backward(model, optimizer)
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="an edit of param_groups, adds a parameter that is not"):
        one_step(model, optimizer)


def test_a_gradient_from_before_a_parameter_was_in_a_group_is_refused():
    model = network()
    optimizer = ds_ext.AdamW(groups_of(model), lr=0.01)
    ds_ext.fuse_into_backward(model, optimizer)
    taken = optimizer.param_groups[0]["params"].pop(0)
    one_step(model, optimizer)
    optimizer.param_groups[0]["params"].append(taken)
    with pytest.raises(RuntimeError, match="0.weight has a gradient that .* computed before"):
        optimizer.step()
    model.zero_grad()
    one_step(model, optimizer)
    assert not torch.equal(taken, network()[0].weight)


def test_states_of_what_was_taken_out_are_not_saved_and_stay():
    model = network()
    optimizer = ds_ext.AdamW(groups_of(model), lr=0.01)
    one_step(model, optimizer)
    taken = optimizer.param_groups[0]["params"].pop(0)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 5 and optimizer.state[taken]["step"] == 1
    optimizer.load_state_dict(saved)
    one_step(model, optimizer)


def test_a_checkpoint_follows_the_groups():
    """What has been stepped and is in no group any more is saved as a weight alone."""
    before, made = table.weights(((4, 3), (4,)), torch.float32), []
    for grads in table.gradients(2, ((4, 3), (4,)), torch.float32):
        made += optimizer_ranks.made(
            lambda params: ds_ext.AdamW([{"params": [p]} for p in params], lr=0.1), before, 1
        )
        optimizer_ranks.step(made[-1:], grads)
        del made[-1].optimizer.param_groups[0]
    one, other = made
    saved = resharding.save(one.optimizer, one.owned)
    assert [*saved["weights"]] == ["0", "1"] and [*saved["state"]] == ["1"]
    optimizer_ranks.load([other], [one])
    assert all(map(torch.equal, other.runs, one.runs))
    first, second = (rank.optimizer.state[rank.params[1]]["v"] for rank in made)
    assert torch.equal(first, second)
    one.optimizer.state[one.params[1]]["v"] = torch.zeros(9)
    with pytest.raises(ValueError, match="replaced by a tensor of another size"):
        resharding.save(one.optimizer, one.owned)
