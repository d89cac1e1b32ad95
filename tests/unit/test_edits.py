"""Edits between steps: of ``param_groups`` and their hyper-parameters, followed or refused.

That a step follows them as torch: tests/scenarios. An edit of a 16-bit weight with a master holds
to half the spacing of its dtype: nothing detects it. A residual that it leaves moves the weight's
value by less than half the spacing above it, and no step may turn that into another weight.
"""

import functools
import math

import numpy
import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.checkpoint import resharding
from ds_ext.optimizer import OPTIMIZERS
from tests.common import models, optimizer_ranks, paths, table
from tests.common.choose import params
from tests.common.plain import steps
from tests.common.ranks import logged
from tests.common.updates import error
from tests.unit.test_precision import number as held

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


SHAPES = ((600,), (13, 290), (3, 40, 30))
by_path = pytest.mark.parametrize("path", paths.EACH)
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16)  # the bits of all 16-bit weights
CODES = {  # the ends, those about zero, and some between
    torch.int8: torch.cat([torch.arange(-128, 128, 11), torch.tensor([-1, 0, 1, 127])]),
    torch.int16: torch.cat([torch.arange(-(2**15), 2**15, 4093), torch.tensor([-1, 0, 2**15 - 1])]),
}
FEW = {torch.int8: torch.tensor([-128, 127]), torch.int16: torch.tensor([-32768, 32767])}


def half_spacing(w):
    """Half the distance from each weight to the next one away from zero."""
    size = w.abs()
    following = (size.view(torch.int16) + 1).view(w.dtype)
    return (following.double() - size.double()) / 2


@pytest.mark.parametrize(
    "half, mode, residual",
    [
        (torch.bfloat16, "master", torch.int16),
        (torch.bfloat16, "master24", torch.int8),
        (torch.float16, "master24", torch.int8),
    ],
    ids=["bf16 master", "bf16 master24", "fp16 master24"],
)
@by_path
def test_any_residual_stays_within_half_a_spacing_of_any_weight(
    path, half, mode, residual, monkeypatch
):
    paths.use(monkeypatch, path)
    w, codes = EVERY.view(half), CODES[residual]
    if path == "kernels":  # Triton's interpreter sets subnormal bf16 numbers to zero
        w, codes = w[(w == 0) | (w.abs() >= torch.finfo(half).smallest_normal)], FEW[residual]
        w = w.to(paths.DEVICE)
    p = nn.Parameter(w.clone())
    optimizer = OPTIMIZERS["lomo"]([p], lr=0.0, weight_update=mode)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    for code in codes:
        p.data.copy_(w)
        optimizer.state[p]["master"].fill_(code)
        value = held(optimizer, p)
        assert value.isnan().equal(w.isnan().cpu())
        finite = w.isfinite().cpu()
        off = (value.double() - w.cpu().double()).abs()[finite]
        # The largest finite weight has no next one; inf is at twice its half spacing.
        limit = half_spacing(w.cpu())[finite].clamp(max=2.0**119)
        assert (off <= limit).all()
        optimizer.step()  # by nothing
        assert p.isnan().equal(w.isnan()) and p[~w.isnan()].equal(w[~w.isnan()])
        same = held(optimizer, p)
        assert same[~same.isnan()].equal(value[~value.isnan()])


def mask(p):
    p[1::3] = 0


def clamp(p):
    p.clamp_(-0.5, 0.5)


def trained(weights, edit, **hypers):
    """The values of bf16 weights after 100 steps with an edit after each, and the updates."""
    params = [nn.Parameter(p.clone()) for p in weights]
    optimizer = OPTIMIZERS["adalomo"](params, lr=1e-4, **hypers)
    for gradients in table.gradients(100, SHAPES, torch.bfloat16):
        steps(optimizer, params, [gradients])
        for p in params:
            edit(p.data)
    return {i: held(optimizer, p) for i, p in enumerate(params)}


@pytest.mark.parametrize("mode, close", [("master", 2e-3), ("master24", 2e-2)])
@pytest.mark.parametrize("edit", [mask, clamp])
@pytest.mark.parametrize("path", params(["ops", "native"], ["native"]))
def test_100_edited_steps_are_those_of_fp32(path, edit, mode, close, monkeypatch):
    """With the format's error. Dropped residuals would lose most of the update."""
    paths.use(monkeypatch, path)
    weights = table.weights(SHAPES, torch.bfloat16)
    expected = trained([p.float() for p in weights], edit)
    found = trained(weights, edit, weight_update=mode)
    assert error(found, expected, dict(enumerate(map(torch.Tensor.float, weights)))) <= close


@by_path
def test_fp16_weights_leave_zero_by_small_steps(path, monkeypatch):
    """A step of 1e-8 is less than half the smallest fp16 number."""
    paths.use(monkeypatch, path)
    p = nn.Parameter(torch.zeros(300, dtype=torch.float16))
    optimizer = OPTIMIZERS["lomo"]([p], lr=1e-8, weight_update="master24")
    steps(optimizer, [p], [[-torch.ones_like(p)]] * 10)
    assert torch.allclose(held(optimizer, p).cpu(), torch.tensor(1e-7, device="cpu"), rtol=0.02)


@pytest.mark.parametrize("mode", ["master", "master24"])
def test_a_weight_whose_master_is_popped_is_exactly_what_it_was_set_to(mode):
    (p,) = map(nn.Parameter, table.weights([(999,)], torch.bfloat16))
    optimizer = OPTIMIZERS["lomo"]([p], lr=0.01, weight_update=mode)
    for gradients in table.gradients(2, [(999,)], torch.bfloat16):
        steps(optimizer, [p], [gradients])
        kept = p.detach().clone()
        for x in (torch.ones(999), kept):  # an average is swapped in for an evaluation
            p.data.copy_(x)
        assert not held(optimizer, p).equal(p.float())
        optimizer.state[p].pop("master")
        assert held(optimizer, p).equal(p.float())
