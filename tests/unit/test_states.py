"""A state that does not match its rule's state_spec is refused, whether it was loaded or edited.

Parameters that are resized inside a model that is stepped in backward: test_odd_models.py of
tests/distributed, and tests/scenarios.
"""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.ops.state import mapped
from ds_ext.optimizer import OPTIMIZERS, param_table, plain_step
from ds_ext.rules import REGISTRY
from tests.common import table
from tests.common.choose import crossed, params, spread
from tests.common.hypers import SIMULATED, changed
from tests.common.states import entries, same

HYPERS = changed(SIMULATED, galoreadamw={"rank": 3}, apollo={"rank": 3})
SHAPES = ((12, 8), (9, 5))
WITHOUT_STATE = {"lomo", "sinkgd", "scale-plain"}
MORE = {  # further forms of what a rule keeps
    "adafactor-plain": ("adafactor", {"beta1": None}),
    "scale-plain": ("scale", {"momentum": 0.0}),
    "came-8": ("came", {"nbits": 8}),
    "adafactor-8": ("adafactor", {"nbits": 8}),
    "lion-8": ("lion", {"nbits": 8}),
    "muon": ("muon", {"ns_dtype": "fp32"}),  # fp64 parameters have no bf16 products
    "muon-8": ("muon", {"nbits": 8, "beta2": 0.9}),
    "galoreadamw-8": ("galoreadamw", {"nbits": 8, "min_8bit_size": 0}),
    "lomo-ema": ("lomo", {"ema_decay": 0.9}),
}
FORMS = {name: (name, {}) for name in OPTIMIZERS} | MORE
KEEPING = [form for form in FORMS if form not in WITHOUT_STATE]
MASTERS = list(itertools.product((torch.bfloat16, torch.float16), ("master", "master24")))


def made(form, shapes=SHAPES, dtype=torch.float32, **hypers):
    name, own = FORMS[form]
    params = [nn.Parameter(p) for p in table.weights(shapes, dtype)]
    named = [(f"layers.{i}", p) for i, p in enumerate(params)]
    return params, OPTIMIZERS[name](named, **HYPERS[name] | own | hypers)


def step(params, optimizer, steps=1, seed=0):
    """Steps by gradients of their own shapes and dtype."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = g.to(p.dtype)
        optimizer.step()


def stepped(form, steps=2, **how):
    params, optimizer = made(form, **how)
    step(params, optimizer, steps)
    return params, optimizer


def picture(params, optimizer):
    """Copies of all that loading or stepping could change."""
    state = [copy.deepcopy(optimizer.state.get(p) or None) for p in params]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [p.detach().clone() for p in params], state, copy.deepcopy(groups)


def refused(params, optimizer, call, match):
    """Whether a call raises ValueError and leaves all as it was."""
    before = picture(params, optimizer)
    with pytest.raises(ValueError, match=match):
        call()
    return same(before, picture(params, optimizer))


def refuses(optimizer, params, saved, match):
    """Whether an optimizer refuses a state and leaves all as it was."""
    return refused(params, optimizer, lambda: optimizer.load_state_dict(saved), match)


@pytest.fixture(scope="module")
def others():
    """An optimizer of each form that has stepped, and refuses all that it is given."""
    return {form: stepped(form) for form in FORMS}


@pytest.mark.parametrize("form, steps", crossed(FORMS, [(0,), (2,)]))
def test_a_state_of_another_optimizer_is_refused(others, form, steps):
    """All ordered pairs. Those of one rule with other hyper-parameters load, for these come too:

    they go on with the bits of the one that was saved. APOLLOMini is APOLLO with other defaults.
    """
    weights, saver = stepped(form, steps)
    saved, before = copy.deepcopy(saver.state_dict()), [p.detach().clone() for p in weights]
    step(weights, saver, seed=1)
    for other in FORMS:
        if REGISTRY[FORMS[other][0]].rule.state_spec is REGISTRY[FORMS[form][0]].rule.state_spec:
            params, optimizer = stepped(other)
            optimizer.load_state_dict(saved)
            for p, was in zip(params, before, strict=True):
                p.data.copy_(was)
            step(params, optimizer, seed=1)
            assert all(map(torch.equal, params, weights)), other
        else:
            params, optimizer = others[other]
            assert refuses(optimizer, params, saved, "not a state of"), other


DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "form, dtype",
    params(
        list(itertools.product(FORMS, DTYPES)), [*spread(FORMS, [(dtype,) for dtype in DTYPES])]
    ),
)
def test_a_state_of_another_floating_dtype_is_cast(form, dtype):
    """As torch casts it: the step has the bits of that from a state that was rounded so."""

    def other(x):
        return x.to(dtype) if x.is_floating_point() else x

    def back(x):
        return x.to(torch.float32) if x.is_floating_point() else x

    (params, optimizer), (twins, twin) = stepped(form), stepped(form)
    saved = optimizer.state_dict()
    twin.load_state_dict(saved | {"state": mapped(saved["state"], lambda x: back(other(x)))})
    optimizer.load_state_dict(saved | {"state": mapped(saved["state"], other)})
    step(params, optimizer, 2, seed=1)
    step(twins, twin, 2, seed=1)
    assert all(map(torch.equal, params, twins))
    assert all(p.isfinite().all() for p in params)


STEPS = (None, -1, 1.5, "two", torch.zeros(2))
WRONG = [(lambda saved, x=x: saved["state"][1].update(step=x), "layers.1 .* step") for x in STEPS]
WRONG += [
    (lambda saved: saved["state"][1].pop("step"), "lacks step"),
    (lambda saved: saved["param_groups"][0].update(betas=(0.9, 1.5)), "betas"),
    # a state dict without a number, as 0.1.0 wrote it, loads: test_resume.py
    (lambda saved: saved.update(ds_ext=2), "format 2, but .* reads format 1: a newer ds_ext wrote"),
    (
        lambda saved: saved["param_groups"][0].update(type="NewRule") or saved.update(ds_ext=2),
        "format 2, but .* reads format 1",
    ),
]


@pytest.mark.parametrize("edit, match", WRONG)
def test_what_is_no_state_dict_is_refused(edit, match):
    params, optimizer = stepped("adamw")
    saved = copy.deepcopy(optimizer.state_dict())
    edit(saved)
    assert refuses(optimizer, params, saved, match)


@pytest.mark.parametrize("other", ["file.pt", {"model": {}, "optimizer": {}}, {"state": {}}])
def test_a_whole_checkpoint_is_no_state_dict(other):
    params, optimizer = stepped("adamw")
    assert refuses(optimizer, params, other, 'a dict with "state" and "param_groups", not ')


def test_other_groups_and_groups_of_other_types_are_refused():
    """A group that Lion steps here and AdamW has stepped there."""
    (params, optimizer), (_, other) = made("adamw"), made("adamw")
    assert refuses(other, params, optimizer.state_dict() | {"param_groups": []}, "does not match")
    optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))], "type": "Lion"})
    other.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))]})
    assert refuses(optimizer, params, other.state_dict(), "Lion steps it")


@pytest.mark.parametrize("form", KEEPING)
def test_a_resized_parameter_is_refused_before_anything_is_stepped(form):
    params, optimizer = stepped(form)
    params[1].data = torch.randn(14, 5)
    before = picture(params, optimizer)
    with pytest.raises(ValueError, match=r"layers.1 .* del optimizer\.state\[param\]"):
        step(params, optimizer)
    with pytest.raises(ValueError, match="state of layers.1 does not fit"):
        ds_ext.fuse_into_backward(nn.ParameterList(params), optimizer)
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


EDITS = {
    "missing": lambda x: None,
    "nothing": lambda x: None,
    "shorter": lambda x: x.flatten()[:-1] if x.numel() > 1 else x.new_zeros(3),
    "longer": lambda x: torch.cat([x.flatten()] * 2),
    "whole_numbers": lambda x: torch.zeros(x.shape, dtype=torch.int32),
}
WAYS = list(itertools.product([0, 1], EDITS))


@pytest.mark.parametrize(
    "form, at, edit", params([(f, *w) for f in KEEPING for w in WAYS], [*spread(KEEPING, WAYS)])
)
def test_an_edited_state_is_refused(form, at, edit):
    check_edits(*stepped(form), at, edit)


@pytest.mark.parametrize("edit", ["nothing", "shorter", "longer"])
@pytest.mark.parametrize("dtype, how", MASTERS)
def test_an_edited_master_is_refused(dtype, how, edit):
    check_edits(*stepped("lomo", dtype=dtype, weight_update=how), 1, edit)


def check_edits(params, optimizer, at, edit):
    """Edits each tensor of a parameter's state, which the next step and a load refuse."""
    saved = optimizer.state_dict()
    for keys, *_ in list(entries(optimizer.state[params[at]])):
        is_made_again = keys == ("ema",) or keys[0] not in saved["state"][at]
        if edit == "missing" and is_made_again:  # an average, or a cache, which is not saved
            continue
        own, twin, given = copy.deepcopy((params, optimizer, saved))
        loads = functools.partial(twin.load_state_dict, given)
        steps = functools.partial(step, own, twin)
        for state, call in ((given["state"][at], loads), (twin.state[own[at]], steps)):
            for inner in [inner for path, inner, _ in entries(state) if path == keys]:
                inner[keys[-1]] = EDITS[edit](inner[keys[-1]])
                if edit == "missing":
                    del inner[keys[-1]]
                assert refused(own, twin, call, f"layers.{at} .*{keys[-1]}")


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


@pytest.mark.parametrize("form, in_place", crossed(KEEPING, [(False,), (True,)]))
def test_a_state_that_lies_otherwise_in_memory_or_was_cast_is_followed(form, in_place):
    def strided(x):
        return torch.stack([x, x], dim=-1)[..., 0]

    def wider(x):
        return x.double() if x.is_floating_point() else strided(x)

    for change in (strided, wider):
        (params, optimizer), (twins, twin) = stepped(form), stepped(form)
        for p in params:
            for keys, inner, x in list(entries(optimizer.state[p])):
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
    # no pass takes fp64
    made_of = [[nn.Parameter(p[0]), nn.Parameter(p[1].double())] for p in (pair, twins)]
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
        ("came", {}, {"nbits": 8}),
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


def test_hyper_parameters_of_version_1_0_that_are_gone():
    """A state loads if it had their defaults."""
    params, optimizer = stepped("muon")
    saved = copy.deepcopy(optimizer.state_dict())
    for value in (0, 1):
        saved["param_groups"][0]["split_dim"] = value
        if value:
            assert refuses(optimizer, params, saved, "split_dim = 1 is a hyper-parameter of ds_ext")
        else:
            optimizer.load_state_dict(saved)
            assert "split_dim" not in optimizer.param_groups[0]
    own = dataclasses.make_dataclass("Own", [("spectral", str, "none")])  # a rule of the user
    assert param_table.of_this_version({"spectral": "unit"}, own) == {"spectral": "unit"}


@pytest.mark.parametrize("how", ["master", "master24"])
@pytest.mark.parametrize("name", ["lomo", "adalomo", "galoreadamw"])
@pytest.mark.parametrize(
    "way", list(itertools.permutations([torch.bfloat16, torch.float16, torch.float32], 2)), ids=str
)
def test_weights_of_another_dtype_than_their_master_was_made_for(name, how, way):
    """The weight is what the model has computed with."""
    params, optimizer = stepped(name, dtype=way[0], weight_update=how)
    for p in params:
        p.data = p.data.to(way[1])
    before = [p.detach().double() for p in params]
    fresh, other = made(name, dtype=way[1], weight_update=how)
    for p, q in zip(fresh, params, strict=True):
        p.data.copy_(q.data)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("master", None)
    other.load_state_dict(saved)
    step(params, optimizer, seed=1)
    step(fresh, other, seed=1)
    # An fp32 copy fits all formats, and 8 bits are read as parts of the new dtype's half spacing.
    is_kept = how == "master24" or way == (torch.float16, torch.bfloat16)
    for p, q, old in zip(params, fresh, before, strict=True):
        p, q = p.detach().double(), q.detach().double()
        most = torch.finfo(way[1]).eps * q.norm() if is_kept else 0.02 * (q - old).norm()
        assert (p - q).norm() <= most
