"""A state that does not match its rule's state_spec is rejected before the step."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from tests.common import table
from tests.common.choose import params, spread
from tests.common.hypers import SIMULATED, changed
from tests.common.states import same

HYPERS = changed(SIMULATED, galoreadamw={"rank": 3}, apollo={"rank": 3})
SHAPES = ((12, 8), (9, 5))
WITHOUT_STATE = {"lomo", "sinkgd"}
MORE = {  # further forms of what a rule keeps
    "adafactor-plain": ("adafactor", {"beta1": None}),
    "scale-plain": ("scale", {"momentum": 0.0}),
    "lion-8": ("lion", {"nbits": 8}),
    "muon": ("muon", {"ns_dtype": "fp32"}),  # fp64 parameters have no bf16 products
    "muon-8": ("muon", {"nbits": 8, "beta2": 0.9}),
    "galoreadamw-8": ("galoreadamw", {"nbits": 8, "min_8bit_size": 0}),
    "lomo-ema": ("lomo", {"ema_decay": 0.9}),
}
FORMS = {name: (name, {}) for name in OPTIMIZERS} | MORE


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


def mapped(state, change):
    if isinstance(state, dict):
        return {k: mapped(x, change) for k, x in state.items()}
    return change(state) if isinstance(state, torch.Tensor) else state


def tensors(state, *above):
    for key, x in state.items():
        if isinstance(x, dict):
            yield from tensors(x, *above, key)
        elif isinstance(x, torch.Tensor):
            yield (*above, key), state, x


# Loading.


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_another_optimizer_is_refused(form, steps):
    """All ordered pairs. Those of one rule with other hyper-parameters load, for these come too:

    they go on with the bits of the one that was saved. APOLLOMini is APOLLO with other defaults.
    """
    weights, saver = stepped(form, steps)
    saved, before = copy.deepcopy(saver.state_dict()), [p.detach().clone() for p in weights]
    step(weights, saver, seed=1)
    for other in FORMS:
        params, optimizer = stepped(other)
        if REGISTRY[FORMS[other][0]].rule.state_spec is REGISTRY[FORMS[form][0]].rule.state_spec:
            optimizer.load_state_dict(saved)
            for p, was in zip(params, before, strict=True):
                p.data.copy_(was)
            step(params, optimizer, seed=1)
            assert all(map(torch.equal, params, weights)), other
        else:
            assert refuses(optimizer, params, saved, "not a state of"), other


def test_a_state_under_the_groups_of_another_optimizer_is_refused():
    """Its groups are those of the one that loads it: keys, shapes and dtypes tell."""
    count = 0
    for form, other in itertools.permutations(FORMS, 2):
        params, optimizer = stepped(other)
        saved = stepped(form)[1].state_dict() | {
            "param_groups": copy.deepcopy(optimizer.state_dict()["param_groups"])
        }
        kept = [{k for k, _, _ in tensors(s["state"][0])} for s in (saved, optimizer.state_dict())]
        if kept[1] <= kept[0]:
            continue  # it has all that the other keeps: see the next test for shapes and dtypes
        count += 1
        assert refuses(optimizer, params, saved, "not fit")
    assert count > len(FORMS) ** 2 / 3


@pytest.mark.parametrize("form", [f for f in FORMS if f not in {*WITHOUT_STATE, "scale-plain"}])
def test_a_state_of_other_shapes_is_refused(form):
    params, optimizer = stepped(form)
    for shapes in (((12, 8), (9, 6)), ((12, 8), (10, 5)), ((13, 8), (9, 5)), ((8, 12), (5, 9))):
        saved = stepped(form, shapes=shapes)[1].state_dict()
        sizes = [
            [x.shape for of in s["state"].values() for *_, x in tensors(of)]
            for s in (saved, optimizer.state_dict())
        ]
        if sizes[0] == sizes[1]:
            continue  # flat moments of as many elements
        assert refuses(optimizer, params, saved, r"layers\.[01] .* shape")
    step(params, optimizer)


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


@pytest.mark.parametrize("step_", [None, -1, 1.5, "two", torch.zeros(2)])
def test_a_step_that_is_no_number_of_steps_is_refused(step_):
    params, optimizer = stepped("adamw")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = step_
    assert refuses(optimizer, params, saved, "layers.1 .* step")
    del saved["state"][1]["step"]
    assert refuses(optimizer, params, saved, "lacks step")


def test_saved_hyper_parameters_that_are_not_allowed_are_refused():
    params, optimizer = stepped("adamw")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["betas"] = (0.9, 1.5)
    assert refuses(optimizer, params, saved, "betas")


def test_a_format_of_a_newer_version_is_refused():
    """A state dict without a number, as 0.1.0 wrote it, loads: test_old_checkpoints.py."""
    params, optimizer = stepped("adamw")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["ds_ext"] += 1
    assert refuses(
        optimizer, params, saved, "format 2, but .* reads format 1: a newer ds_ext wrote"
    )


def test_groups_of_other_types_are_refused():
    """A group that Lion steps here and AdamW has stepped there."""
    params, optimizer = made("adamw")
    optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))], "type": "Lion"})
    (other,) = [o for _, o in [made("adamw")]]
    other.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))]})
    saved = other.state_dict()
    assert refuses(optimizer, params, saved, "Lion steps it")


# Masters.

MASTERS = [(torch.bfloat16, "master"), (torch.float16, "master"), (torch.bfloat16, "master24")]
MASTERS += [(torch.float16, "master24")]


@pytest.mark.parametrize("dtype, how", MASTERS)
@pytest.mark.parametrize("name", ["lomo", "adalomo", "galoreadamw"])
def test_a_master_of_another_size_is_refused(name, dtype, how):
    params, optimizer = stepped(name, dtype=dtype, weight_update=how)
    saved = copy.deepcopy(optimizer.state_dict())
    for wrong in (lambda x: x[:-1], lambda x: torch.cat([x, x]), lambda x: x[:, None]):
        edited = copy.deepcopy(saved)
        edited["state"][1]["master"] = wrong(edited["state"][1]["master"])
        assert refuses(optimizer, params, edited, "layers.1 .* master ")
        optimizer.state[params[1]]["master"] = wrong(saved["state"][1]["master"])
        with pytest.raises(ValueError, match="layers.1 .* master "):
            step(params, optimizer)
        optimizer.load_state_dict(saved)
    step(params, optimizer)


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
    other.load_state_dict(_without_masters(optimizer.state_dict()))
    step(params, optimizer, seed=1)
    step(fresh, other, seed=1)
    # An fp32 copy fits all formats, and 8 bits are read as parts of the new dtype's half spacing.
    is_kept = how == "master24" or way == (torch.float16, torch.bfloat16)
    for p, q, old in zip(params, fresh, before, strict=True):
        p, q = p.detach().double(), q.detach().double()
        most = torch.finfo(way[1]).eps * q.norm() if is_kept else 0.02 * (q - old).norm()
        assert (p - q).norm() <= most


def _without_masters(saved):
    saved = copy.deepcopy(saved)
    for state in saved["state"].values():
        state.pop("master", None)
    return saved


# Between steps.
