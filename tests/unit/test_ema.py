"""Moving averages of weights: torch's, kept by the step, exchanged with the weights and back."""

import copy
import functools
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ds_ext
from ds_ext.backward.fuse import fuse_into_backward
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.expert_stacks import matrices
from tests.common import paths
from tests.common.choose import params
from tests.common.states import same

DECAY, STEPS = 0.9, 20
KEPT = (Tensor, nn.Parameter)
# Batches, factored statistics, whole matrices, states that a step replaces.
RULES = {"adamw": 1e-2, "adalomo": 5e-2, "muon": 5e-2, "galoreadamw": 5e-2, "apollo": 5e-2}
RULES |= {"apollomini": 1e-2, "lomo": 3.0, "lion": 5e-3}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.head = nn.Linear(24, 5)
        self.experts = nn.Module()
        self.experts.num_experts = 3
        self.experts.up = nn.Parameter(0.3 * torch.randn(3, 5, 7))

    def forward(self, x):
        h = self.head(torch.tanh(self.conv(x)).flatten(1))
        return (h @ self.experts.up).square().mean()


def made(rule, dtype=torch.float32, **hypers):
    torch.manual_seed(0)
    model = Net().to(dtype)
    given = {"lr": RULES[rule], "ema_decay": DECAY} | hypers
    if rule in ("galoreadamw", "apollo", "apollomini"):
        given |= {"rank": 3, "update_proj_gap": 4}
    return model, OPTIMIZERS[rule].for_model(model, **given)


def batch(step, model):
    p = model.conv.weight
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 2, 4, 4, generator=g, device="cpu").to(p.device, p.dtype)


def train(model, optimizer, steps=range(STEPS), after=lambda step: None):
    for step in steps:
        model(batch(step, model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def values(optimizer, param):
    run = param.detach().view(-1)
    return optimizer.weights(param, run, optimizer.shard(param)).double().view_as(param)


def averages(optimizer, model):
    found = {}
    for name, param in model.named_parameters():
        states = [s for *_, s in matrices(optimizer.shard(param), optimizer.state[param])]
        found[name] = torch.cat([s["ema"] for s in states]).double().view(param.shape).cpu()
    return found


class Torchs:
    """torch's average of the weights of each step, in fp64, and its distance from another one."""

    def __init__(self, model, optimizer, decay=DECAY):
        self.model, self.optimizer = model, optimizer
        self.now = copy.deepcopy(model).cpu().double()
        self.averaged = AveragedModel(self.now, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.start = copy.deepcopy(self.now).state_dict()

    def update(self, step=0):
        with torch.no_grad():
            for to, p in zip(self.now.parameters(), self.model.parameters(), strict=True):
                to.copy_(values(self.optimizer, p))
        self.averaged.update_parameters(self.now)

    def averages(self):
        return {n: p.detach() for n, p in self.averaged.module.named_parameters()}

    def error(self, found):
        """The largest error, relative to the movement of the average."""
        wanted = self.averages()
        return max(
            float((a - wanted[n]).norm() / (wanted[n] - self.start[n]).norm())
            for n, a in found.items()
        )


def bits(optimizer, model):
    states = copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    return [p.detach().clone() for p in model.parameters()], states


WAYS = [(rule, path) for rule in RULES for path in ("native", "ops")]
WAYS += [("adamw", "kernels"), ("adalomo", "kernels")]
QUICK = [(rule, "native") for rule in RULES] + [("adalomo", "ops"), ("adamw", "kernels")]


@pytest.mark.supports("moving averages of the weights (`ema_decay`)", stage=None, optimizer="rule")
@pytest.mark.parametrize("rule, path", params(WAYS, QUICK))
def test_the_average_is_torchs(monkeypatch, rule, path):
    paths.use(monkeypatch, path)
    model, optimizer = made(rule)
    torchs = Torchs(model, optimizer)
    train(model, optimizer, range(STEPS if path != "kernels" else 2), after=torchs.update)
    assert torchs.error(averages(optimizer, model)) <= 1e-6


@pytest.mark.parametrize("how", ["stochastic", "nearest", "master", "master24"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_average_of_other_dtypes_includes_masters(dtype, how):
    model, optimizer = made("adamw", dtype, weight_update=how)
    torchs = Torchs(model, optimizer)
    train(model, optimizer, after=torchs.update)
    found = {p: s["ema"].dtype for p, s in optimizer.state.items() if "ema" in s}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {*found.values()} == {wide}
    assert torchs.error(averages(optimizer, model)) <= 1e-6


OF_BF16 = [("adamw", torch.bfloat16), ("adamw", torch.float32), ("lomo", torch.float64)]


@pytest.mark.parametrize("rule, dtype", params(OF_BF16, OF_BF16[:1]))
def test_an_average_in_bf16_has_no_bias(rule, dtype):
    """Rounded to nearest it would stand still, because 0.001 of a change is less than a unit."""
    model, optimizer = made(rule, dtype, ema_decay=0.999, ema_dtype="bf16", lr=1e-3)
    torchs = Torchs(model, optimizer, 0.999)
    drift = torch.Generator().manual_seed(1)
    moved = {n: 0.2 * torch.randn(p.shape, generator=drift) for n, p in model.named_parameters()}
    train(model, optimizer, range(1))
    torchs.update()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(moved[n].to(dtype))
    train(model, optimizer, range(1, 150), after=torchs.update)
    found, wanted = averages(optimizer, model), torchs.averages()
    change = torch.cat([(w - torchs.start[n]).flatten() for n, w in wanted.items()])
    error = torch.cat([(found[n] - w).flatten() for n, w in wanted.items()])
    assert 1e-3 <= float(error.norm() / change.norm()) <= 0.5  # each element is rounded
    # Along the change, errors cancel.
    assert abs(float((error * change).sum() / change.square().sum())) <= 0.05
    assert {s["ema"].dtype for s in optimizer.state.values() if "ema" in s} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_averages_have_the_same_bits_in_native_code_and_kernels(monkeypatch, dtype):
    found = []
    for path in ("native", "ops", "kernels"):
        with monkeypatch.context() as patch:
            paths.use(patch, path)
            model, optimizer = made("lomo", dtype, ema_dtype="bf16", weight_update="nearest")
            train(model, optimizer, range(1))
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            found.append(averages(optimizer, model))
    assert same(found[0], found[1]) and same(found[0], found[2])
    exact = {n: a.bfloat16().double() for n, a in found[0].items()}
    assert same(exact, found[0])


def test_sections_of_a_matrix_are_averaged_like_the_matrix():
    torch.manual_seed(0)
    for keys in ({"split": [8, 4, 4]}, {"heads": 2}):
        for dtype, bound in (("fp32", 1e-6), ("bf16", 2e-2)):
            model = nn.Linear(12, 16, bias=False)
            hypers = {"lr": 0.05, "ema_decay": DECAY, "ema_dtype": dtype}
            optimizer = ds_ext.Muon(model.parameters(), **hypers, **keys)
            torchs = Torchs(model, optimizer)
            for step in range(STEPS):
                x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                torchs.update()
            assert torchs.error(averages(optimizer, model)) <= bound


KINDS = [(torch.float32, "fp32", "stochastic"), (torch.float64, "fp32", "stochastic")]
KINDS += [(torch.bfloat16, "fp32", how) for how in ("stochastic", "master")]
KINDS += [(torch.float16, "fp32", "master")]
KINDS += [(half, "bf16", "master24") for half in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("dtype, of_average, how", KINDS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_weights_are_exchanged_and_restored_bit_for_bit(dtype, of_average, how, is_fused):
    hypers = {"ema_dtype": of_average, "weight_update": how}
    model, optimizer = made("adamw", dtype, **hypers)
    other, undisturbed = made("adamw", dtype, **hypers)
    stepper = fuse_into_backward(model, optimizer) if is_fused else optimizer
    form = torch.contiguous_format if is_fused else torch.channels_last
    if is_fused:
        fuse_into_backward(other, undisturbed)
    for m, o in ((model, optimizer), (other, undisturbed)):
        train(m.to(memory_format=form), o, range(5))
    before, wanted = bits(optimizer, model), averages(optimizer, model)
    with stepper.ema():
        for n, p in model.named_parameters():
            average = wanted[n] if dtype == torch.float64 else wanted[n].float()
            assert torch.equal(p, average.to(dtype)) and not same(before[0], [*model.parameters()])
        assert model.conv.weight.is_contiguous(memory_format=form)
    assert same(before, bits(optimizer, model))
    assert model.conv.weight.is_contiguous(memory_format=form)
    with pytest.raises(KeyError, match="of the caller"), stepper.ema():
        raise KeyError("of the caller")
    assert same(before, bits(optimizer, model))
    train(model, optimizer, range(5, 8))
    train(other, undisturbed, range(5, 8))
    assert same(bits(optimizer, model), bits(undisturbed, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_one_copy_of_the_weights_is_kept(dtype):
    model, optimizer = made("adamw", dtype)
    train(model, optimizer, range(2))
    before = {id(x) for x in gc.get_objects() if type(x) in KEPT}
    with optimizer.ema():
        more = [x for x in gc.get_objects() if type(x) in KEPT and id(x) not in before]
    assert sum(x.nbytes for x in more) == sum(p.nbytes for p in model.parameters())


def test_frozen_weights_and_weights_without_a_step_stay_as_they_are():
    model, optimizer = made("adamw")
    with optimizer.ema():  # before the first step
        assert same([*model.parameters()], [*made("adamw")[0].parameters()])
    model.conv.requires_grad_(False)
    train(model, optimizer, range(3))
    held = model.conv.weight.clone()
    with optimizer.ema():
        assert torch.equal(model.conv.weight, held)


def test_inside_nothing_is_stepped_saved_or_loaded():
    model, optimizer = made("adamw")
    train(model, optimizer, range(2))
    saved, before = optimizer.state_dict(), bits(optimizer, model)
    actions = [optimizer.step, optimizer.state_dict, optimizer.ema().__enter__]
    actions += [functools.partial(act, optimizer) for act in (copy.deepcopy, pickle.dumps)]
    actions += [functools.partial(optimizer.load_state_dict, saved)]
    with optimizer.ema():
        model(batch(0, model)).backward()
        for action in actions:
            with pytest.raises(RuntimeError, match="inside ema\\(\\)"):
                action()
    optimizer.zero_grad()
    assert same(before, bits(optimizer, model))
    assert same(saved["state"], pickle.loads(pickle.dumps(optimizer)).state_dict()["state"])


@pytest.mark.parametrize("policy", ["fused", "sharded"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_inside_backward_steps_nothing(policy, max_grad_norm):
    model, optimizer = made("adamw")
    given = {"gradient_policy": policy, "max_grad_norm": max_grad_norm}
    fused = fuse_into_backward(model, optimizer, **given)
    fused.backward(model(batch(0, model)))
    with pytest.raises(RuntimeError, match="end of the step"):
        fused.ema()
    optimizer.step()
    before = bits(optimizer, model)
    with pytest.raises(RuntimeError, match="fuse_into_backward returned"):
        optimizer.ema()
    with fused.ema():
        others = (lambda _: optimizer.step()), (lambda _: fused.ema())
        for begin in (Tensor.backward, fused.backward, *others):
            with pytest.raises(RuntimeError, match="inside ema\\(\\)"):
                begin(model(batch(0, model)))
            optimizer.zero_grad()
    assert same(before, bits(optimizer, model))


def test_without_a_decay_the_error_names_the_key():
    model, optimizer = made("adamw", ema_decay=0.0)
    train(model, optimizer, range(2))
    assert all("ema" not in s for s in optimizer.state.values())
    with pytest.raises(ValueError, match="ema_decay"), optimizer.ema():
        pass
    for wrong in ({"ema_decay": 1.0}, {"ema_decay": -0.1}, {"ema_dtype": "fp16"}):
        with pytest.raises(ValueError, match=[*wrong][0]):
            made("adamw", **wrong)


def test_groups_have_their_own_decay_and_other_rules_inherit_the_optimizers():
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": [model.conv.weight], "ema_decay": 0.5},
        {"params": [model.head.weight, model.head.bias], "type": "Lion", "lr": 1e-2},
        {"params": [model.conv.bias, model.experts.up], "ema_decay": 0.0},
    ]
    optimizer = ds_ext.AdamW(groups, lr=1e-2, ema_decay=DECAY)
    fast, usual = Torchs(model, optimizer, 0.5), Torchs(model, optimizer)
    train(model, optimizer, after=lambda _: (fast.update(), usual.update()))
    states = {n: (p.shape, optimizer.state[p]) for n, p in model.named_parameters()}
    found = {n: s["ema"].double().view(shape) for n, (shape, s) in states.items() if "ema" in s}
    assert found.keys() == {"conv.weight", "head.weight", "head.bias"}
    assert fast.error({"conv.weight": found.pop("conv.weight")}) <= 1e-6
    assert usual.error(found) <= 1e-6


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("rule, how", [("adamw", "master"), ("galoreadamw", "stochastic")])
def test_an_average_may_start_and_end_later(rule, how, is_fused):
    model, optimizer = made(rule, torch.bfloat16, ema_decay=0.0, weight_update=how)
    if is_fused:
        fuse_into_backward(model, optimizer)
    train(model, optimizer, range(3))
    torchs = Torchs(model, optimizer)
    torchs.update()  # starts with the weights of now
    for group in optimizer.param_groups:
        group["ema_decay"] = DECAY
    train(model, optimizer, range(3, 3 + STEPS), after=torchs.update)
    assert torchs.error(averages(optimizer, model)) <= 1e-6
    for group in optimizer.param_groups:
        group["ema_decay"] = 0.0
    train(model, optimizer, range(1))
    shards = [(optimizer.shard(p), s) for p, s in optimizer.state.items()]
    assert not any("ema" in s for shard, state in shards for *_, s in matrices(shard, state))


def test_state_dicts_of_before_there_were_averages_load_without():
    plain, without = made("adamw", ema_decay=0.0)
    train(plain, without, range(3))
    saved = without.state_dict()
    for group in saved["param_groups"]:
        del group["ema_decay"], group["ema_dtype"]
    again = made("adamw")[1]
    again.load_state_dict(saved)
    assert {group["ema_decay"] for group in again.param_groups} == {0.0}
