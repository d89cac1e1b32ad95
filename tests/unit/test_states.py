"""What is kept of a parameter is what its rule declares, or is refused before anything changes."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import ops
from ds_ext.optimizer import OPTIMIZERS, plain_step
from ds_ext.rules import REGISTRY
from tests.common import table
from tests.common.choose import params, spread
from tests.common.hypers import FOR_ALL, SIMULATED, changed
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
}
FORMS = {name: (name, {}) for name in OPTIMIZERS} | MORE


def made(form, shapes=SHAPES, dtype=torch.float32, **hypers):
    """Parameters and an optimizer of them by name."""
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
    """The tensors of a state, with what leads to them."""
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


def test_a_state_in_fp64_is_taken_as_torch_takes_it():
    params = [nn.Parameter(torch.randn(40, 30)) for _ in range(2)]
    twins = copy.deepcopy(params)
    optimizer, twin = ds_ext.AdamW(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    for one, other in ((params, optimizer), (twins, twin)):
        step(one, other)
        saved = other.state_dict()
        other.load_state_dict(saved | {"state": mapped(saved["state"], lambda x: x.double())})
        before = [p.detach().clone() for p in one]
        step(one, other, 3, seed=1)
    for p, q, old in zip(params, twins, before, strict=True):
        assert (p - q).norm() <= 1e-5 * (q - old).norm()


@pytest.mark.parametrize("form", ["adamw", "apollo", "lomo"])
def test_a_step_that_is_a_tensor_is_a_number(form):
    params, optimizer = stepped(form)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = torch.tensor(float(state["step"]))
    optimizer.load_state_dict(saved)
    step(params, optimizer)
    assert {optimizer.state[p]["step"] for p in params} == {3}


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


def test_a_resized_embedding_is_refused_when_its_state_is_loaded():
    """32,000 to 32,064 rows, as of a padded vocabulary: it ended the process by a signal."""
    small, large = ([nn.Parameter(torch.randn(n, 8))] for n in (32_000, 32_064))
    optimizer, other = ds_ext.AdaLomo(small), ds_ext.AdaLomo(large)
    step(small, optimizer)
    saved = optimizer.state_dict()
    assert refuses(other, large, saved, r"\[32064, 8\].*32000")
    step(large, other)


# Masters.

MASTERS = [
    (torch.bfloat16, "master"),
    (torch.float16, "master"),
    (torch.bfloat16, "master24"),
    (torch.float16, "master24"),
]


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
    "form, at, edit",
    params([(f, *w) for f in KEEPING for w in WAYS], [*spread(KEEPING, WAYS)]),
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
        if keys[0] not in optimizer.state_dict()["state"][at]:  # a cache is computed again
            other = copy.deepcopy(optimizer)
            others = other.param_groups[0]["params"]
            step(twins, twin)
            step(others, other)
            assert all(map(torch.equal, twins, others))
            continue
        assert refused(twins, twin, lambda t=twins, o=twin: step(t, o), f"layers.{at} .*{keys[-1]}")


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
    with pytest.raises(ValueError, match="layers.0 does not fit it"):
        step(params, optimizer)
    assert same(before, picture(params, optimizer)[:2])


def test_a_parameter_that_was_frozen_goes_on_with_its_state():
    (params, optimizer), (twins, twin) = stepped("came"), stepped("came")
    params[0].requires_grad_(False)
    params[0].grad = None
    step(params[1:], optimizer, seed=1)
    params[0].requires_grad_(True)
    twins[0].grad = None
    step(twins[1:], twin, seed=1)
    step(params, optimizer, seed=2)
    step(twins, twin, seed=2)
    assert all(map(torch.equal, params, twins))
    assert [optimizer.state[p]["step"] for p in params] == [3, 4]


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


@pytest.mark.parametrize("name", FOR_ALL)
def test_a_fused_model_goes_to_fp64_and_back(name):
    models = Model(), Model()
    optimizers = [OPTIMIZERS[name](m.parameters(), **HYPERS[name]) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        ds_ext.fuse_into_backward(model, optimizer)
    before = [p.detach().clone() for p in models[0].parameters()]
    for dtype in (torch.float32, torch.float64, torch.float32):
        models[0].to(dtype)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.arange(10)).backward()
            optimizer.step()
    rounded = 0.05 if name == "flashadamw" else 1e-4
    for p, q, old in zip(*(m.parameters() for m in models), before, strict=True):
        assert (p - q).norm() <= rounded * (q - old).norm()


def test_states_of_all_dtypes_that_rules_keep_are_seen_here():
    """Which the tests of edits are to cover."""
    kept = set()
    for form in FORMS:
        params, optimizer = stepped(form)
        kept |= {x.dtype for *_, x in tensors(optimizer.state[params[0]])}
    assert kept == {torch.float32, torch.int8, torch.uint8, torch.int16, torch.int64}
    assert set(REGISTRY) == set(OPTIMIZERS)
    assert ops.accumulator(torch.float64) == torch.float64
