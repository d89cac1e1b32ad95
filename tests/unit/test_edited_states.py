"""States and parameters that are edited between steps are followed, or refused before the step."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.optimizer import OPTIMIZERS, plain_step
from tests.common import table
from tests.common.choose import params, spread
from tests.common.hypers import FOR_ALL
from tests.common.states import same
from tests.unit.test_states import (
    FORMS,
    HYPERS,
    SHAPES,
    WITHOUT_STATE,
    made,
    picture,
    refused,
    step,
    stepped,
    tensors,
)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_goes_to_fp64_and_back(form):
    (params, optimizer), (twins, twin) = stepped(form), stepped(form)
    before = [p.detach().clone() for p in params]
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
        for p in params:
            p.data, p.grad = p.data.to(dtype), None
        step(params, optimizer, seed=3)
        step(twins, twin, seed=3)
    for p, q, old in zip(params, twins, before, strict=True):
        rounded = 0.05 if "8" in form or form == "flashadamw" else 1e-5
        assert (p - q).norm() <= rounded * (q - old).norm()
    for p in params:
        kept = {x.dtype for *_, x in tensors(optimizer.state[p]) if x.is_floating_point()}
        assert kept <= {torch.float32}


@pytest.mark.parametrize("form", FORMS)
def test_a_resized_parameter_is_refused_before_anything_is_stepped(form):
    params, optimizer = stepped(form)
    has_state = any(True for _ in tensors(optimizer.state[params[1]]))
    params[1].data = torch.randn(14, 5)
    if not has_state:
        step(params, optimizer)
        return
    before = picture(params, optimizer)
    with pytest.raises(ValueError, match=r"layers.1 .* del optimizer\.state\[param\]"):
        step(params, optimizer)
    assert same(before, picture(params, optimizer))
    del optimizer.state[params[1]]
    step(params, optimizer)
    assert params[1].isfinite().all() and [optimizer.state[p]["step"] for p in params] == [3, 1]


def test_a_gradient_of_before_a_resize_is_refused():
    params, optimizer = made("lomo")
    params[1].grad = torch.ones(9, 5)
    params[1].data = torch.randn(14, 5)
    assert refused(
        params, optimizer, optimizer.step, "layers.1 has 70 elements and its gradient 45"
    )


def _edits():
    def shorter(x):
        return x.flatten()[:-1] if x.numel() > 1 else torch.zeros(3, dtype=x.dtype)

    def longer(x):
        return torch.cat([x.flatten(), x.flatten()])

    def whole_numbers(x):
        return torch.zeros(x.shape, dtype=torch.int32)

    def nothing(x):
        return None

    return {"shorter": shorter, "longer": longer, "int32": whole_numbers, "None": nothing}


KEEPING = [f for f in FORMS if f not in {*WITHOUT_STATE, "scale-plain"}]
WAYS = list(itertools.product([0, 1], _edits()))


@pytest.mark.parametrize(
    "form, at, edit", params([(f, *w) for f in KEEPING for w in WAYS], [*spread(KEEPING, WAYS)])
)
def test_an_edited_state_is_refused(form, at, edit):
    params, optimizer = stepped(form)
    for keys, *_ in list(tensors(optimizer.state[params[at]])):
        twins, twin = copy.deepcopy((params, optimizer))
        twins = twin.param_groups[0]["params"]
        ((inner, x),) = [(s, x) for k, s, x in tensors(twin.state[twins[at]]) if k == keys]
        inner[keys[-1]] = _edits()[edit](x)
        assert refused(twins, twin, lambda t=twins, o=twin: step(t, o), f"layers.{at} .*{keys[-1]}")
        inner[keys[-1]] = x
        del inner[keys[-1]]
        is_cache = keys[0] not in optimizer.state_dict()["state"][at]
        if is_cache or keys == ("ema",):  # a cache is computed, an average begun again
            other = copy.deepcopy(optimizer)
            others = other.param_groups[0]["params"]
            step(twins, twin)
            step(others, other)
            assert all(map(torch.equal, twins, others))
            continue
        assert refused(twins, twin, lambda t=twins, o=twin: step(t, o), f"layers.{at} .*{keys[-1]}")


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_number_of_steps_is_refused(form):
    params, optimizer = stepped(form)
    optimizer.state[params[1]]["step"] = -1
    assert refused(params, optimizer, lambda: step(params, optimizer), "layers.1 .*step is -1")


def test_an_edited_state_is_refused_before_another_bucket_is_stepped(monkeypatch):
    monkeypatch.setattr(plain_step, "BATCHED_BUCKET_ELEMENTS", 1)
    params, optimizer = stepped("adalomo")
    optimizer.state[params[1]]["v"]["row"] = torch.zeros(1, 3)
    assert refused(params, optimizer, lambda: step(params, optimizer), "layers.1 .*v.row")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("form", KEEPING)
def test_a_state_that_lies_otherwise_in_memory_or_was_cast_is_followed(form, in_place):
    def strided(x):
        return torch.stack([x, x], dim=-1)[..., 0]

    def wider(x):
        return x.double() if x.is_floating_point() else strided(x)

    for change in (strided, wider):
        (params, optimizer), (twins, twin) = stepped(form), stepped(form)
        for p in params:
            for keys, inner, x in list(tensors(optimizer.state[p])):
                if in_place:
                    x.data = change(x)
                else:
                    inner[keys[-1]] = change(x)
        step(params, optimizer, 2, seed=1)
        step(twins, twin, 2, seed=1)
        assert all(map(torch.equal, params, twins))


def test_after_a_refused_step_the_next_takes_the_states_as_they_are_then():
    """The one that is refused is stepped alone, beside one whose state had been looked at."""
    pair, twins = [(table.weights(SHAPES, torch.float32)) for _ in range(2)]
    made_of = [
        [nn.Parameter(p[0]), nn.Parameter(p[1].double())] for p in (pair, twins)
    ]  # no pass takes fp64
    both = [ds_ext.AdamW(p) for p in made_of]
    for p, optimizer in zip(made_of, both, strict=True):
        step(p, optimizer)
    own, state = made_of[0], both[0].state
    kept = state[own[1]].pop("m")
    with pytest.raises(ValueError, match="lacks m"):
        step(own, both[0], seed=1)
    state[own[1]]["m"] = kept
    for key in ("m", "v"):
        state[own[0]][key] = state[own[0]][key].clone()
    for p, optimizer in zip(made_of, both, strict=True):
        step(p, optimizer, 2, seed=1)
    assert all(map(torch.equal, *made_of))
    assert same(state[own[0]], both[1].state[made_of[1][0]])


@pytest.mark.parametrize(
    "name, hypers, change",
    [
        ("lion", {}, {"nbits": 8}),
        ("lion", {"nbits": 8}, {"nbits": 32}),
        ("adafactor", {"beta1": None}, {"beta1": 0.9}),
        ("scale", {"momentum": 0.0}, {"momentum": 0.9}),
        ("galoreadamw", {}, {"rank": 2}),
        ("apollo", {}, {"rank": 2}),
    ],
)
def test_a_hyper_parameter_that_another_state_belongs_to_is_refused(name, hypers, change):
    params, optimizer = stepped(name, **hypers)
    before = picture(params, optimizer)[:2]
    optimizer.param_groups[0].update(change)
    if "nbits" in change:
        with pytest.raises(ValueError, match="layers.0 does not fit it: its kind of m is that of"):
            optimizer.state_dict()
    with pytest.raises(ValueError, match="layers.0 does not fit it"):
        step(params, optimizer)
    assert same(before, picture(params, optimizer)[:2])


# In backward.


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.embed(x)).square().mean()


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["fused", "sharded"])
@pytest.mark.parametrize("name", FOR_ALL)
def test_a_resize_of_a_fused_model_is_refused_in_backward(name, policy, clip):
    model = Model()
    optimizer = OPTIMIZERS[name](model.named_parameters(), **HYPERS[name])
    fused = ds_ext.fuse_into_backward(
        model, optimizer, bucket_size=1, gradient_policy=policy, max_grad_norm=clip
    )
    fused.backward(model(torch.arange(10)))
    optimizer.step()
    model.embed.weight.data = torch.randn(16, 6)
    before = picture([*model.parameters()], optimizer)
    with pytest.raises(RuntimeError, match=r"embed.weight has the shape \[16, 6\] now"):
        fused.backward(model(torch.arange(16)))
    assert same(before, picture([*model.parameters()], optimizer))
    with (
        pytest.raises(ValueError, match="embed.weight does not fit")
        if has_kept(optimizer, model)
        else contextlib.nullcontext()
    ):
        ds_ext.fuse_into_backward(model, optimizer)
    optimizer.state.pop(model.embed.weight)
    fused = ds_ext.fuse_into_backward(model, optimizer)
    before = model.embed.weight.detach().clone()
    fused.backward(model(torch.arange(16)))
    optimizer.step()
    assert (model.embed.weight != before).any(dim=1).all()


def has_kept(optimizer, model):
    return any(True for _ in tensors(optimizer.state[model.embed.weight]))
