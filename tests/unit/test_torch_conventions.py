"""What torch's own tests ask of every optimizer: hooks, copies, names, others' keys, odd shapes.
That torch's default dtype and device are the user's: neither a step nor its memory depends on them.
"""

import ast
import copy
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Parameter

import ds_ext
from ds_ext import hyperparams
from ds_ext.ops import quantize, rounding
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.rules import REGISTRY
from tests.common import needs, paths, plain, table
from tests.common.choose import crossed, params
from tests.common.hypers import FOR_ALL, NEEDED
from tests.common.simulated import shapes_of
from tests.common.states import tensors
from tests.unit.test_kernels import SETTINGS

RULES = list(REGISTRY)
# What timm, mmengine, SAM, DeepSpeed and torch's schedulers put into groups.
KEYS = ["lr_scale", "lr_mult", "decay_mult", "layer_id", "group_name", "rho", "adaptive"]
KEYS += ["initial_lr", "max_lr", "min_lr", "base_momentum", "swa_lr", "moe"]


def made(name, params, **hypers):
    return OPTIMIZERS[name](params, **NEEDED[name] | hypers)


def matrices(names="xyz"):
    torch.manual_seed(0)
    return {n: Parameter(torch.randn(4, 4)) for n in sorted(names)}


def stepped(optimizer, params, seed):
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(params):
        params[name].grad = torch.randn(4, 4, generator=generator)
    optimizer.step()


COPIES = {
    "loaded": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()) or optimizer,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", RULES)
def test_a_copy_is_whole_and_takes_a_group_after_torch_has_put_keys_into_the_defaults(name, way):
    params = matrices()
    optimizer = made(name, list(params.values()))
    stepped(optimizer, params, 1)
    public = {key for key in vars(optimizer) if not key.startswith("_")}
    optimizer = COPIES[way](optimizer)
    assert {key for key in vars(optimizer) if not key.startswith("_")} == public
    assert optimizer.group_of.keys() == {*optimizer.param_groups[0]["params"]}
    added = matrices("w")
    optimizer.add_param_group({"params": list(added.values()), "lr": 0.5})
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()
    stepped(optimizer, added, 2)
    assert not torch.equal(added["w"], matrices("w")["w"])


@pytest.mark.parametrize("name", ["came", "adafactor"])
def test_a_pickle_of_an_earlier_version_lacks_later_hyper_parameters(name):
    params = matrices()
    optimizer = made(name, list(params.values()))
    stepped(optimizer, params, 1)
    for key in ("nbits", "ema_decay", "ema_dtype"):
        del optimizer.param_groups[0][key], optimizer.defaults[key]
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert loaded.param_groups[0]["nbits"] == 32 and loaded.param_groups[0]["ema_decay"] == 0
    stepped(loaded, dict(zip(params, loaded.params(), strict=True)), 2)


@pytest.mark.parametrize("name", RULES)
def test_states_load_by_names(name):
    """torch's recipe: a pre-hook puts saved states where the parameters of their names are."""
    old = matrices()
    optimizer = made(name, list(old.items()))
    for seed in (1, 2):
        stepped(optimizer, old, seed)
    new = {n: Parameter(old[n].detach().clone()) for n in "zxy"}
    renamed = made(name, list(new.items()))

    def by_name(loading, state_dict):
        (saved,), (own,) = state_dict["param_groups"], loading.state_dict()["param_groups"]
        ids = dict(zip(saved["param_names"], saved["params"], strict=True))
        pairs = zip(own["param_names"], own["params"], strict=True)
        states = state_dict["state"]
        return {
            "state": {i: states[ids[n]] for n, i in pairs if ids[n] in states},
            "param_groups": [own],
        }

    seen = []
    renamed.register_load_state_dict_pre_hook(by_name)
    renamed.register_load_state_dict_post_hook(
        lambda loaded: seen.append({n: loaded.state.get(p) for n, p in new.items()})
    )
    renamed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for n, p in new.items():  # the post-hook has seen the states as they are stepped by
        assert seen[0][n] is renamed.state.get(p)
    for seed in (3, 4):
        stepped(optimizer, old, seed)
        stepped(renamed, new, seed)
    for n in "xyz":
        torch.testing.assert_close(new[n], old[n], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("name", ["adalomo", "muon"])
def test_step_hooks_get_what_the_caller_gave(name, fuses):
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = made(name, model.parameters())
    if fuses:
        ds_ext.fuse_into_backward(model, optimizer)
    seen = []

    def closure():
        seen.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.register_step_pre_hook(lambda *given: seen.append(given))
    optimizer.register_step_post_hook(lambda *given: seen.append(given))
    before = model.weight.detach().clone()
    with torch.no_grad():
        assert optimizer.step(closure) > 0
    assert seen == [x := (optimizer, (optimizer, closure), {}), "closure", x]
    optimizer.step(closure=closure)
    assert seen[3:] == [x := (optimizer, (optimizer,), {"closure": closure}), "closure", x]
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", RULES)
def test_keys_that_others_read_are_kept_in_groups(name):
    (p,) = matrices("x").values()
    given = dict.fromkeys(KEYS, 0.5)
    optimizer = made(name, [{"params": [p]} | given])
    assert optimizer.param_groups[0].items() >= given.items()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0].items() >= given.items()


MISSPELT = ["lrr", "LR", "learning_rate", "weight_dacay", "weight-decay", "wd", "wieght_decay"]
MISSPELT += ["weight_updat", "sed", "maximize", "amsgrad"]


@pytest.mark.parametrize("key", MISSPELT)
@pytest.mark.parametrize("name", RULES)
def test_keys_that_look_like_misspelt_ones_are_refused(name, key):
    (p,) = matrices("x").values()
    with pytest.raises(ValueError, match=f"unknown key {key}"):
        made(name, [{"params": [p], key: 0.5}])


@pytest.mark.parametrize("key", ["param_groups", "target_modules", "others"])
def test_keys_that_need_names_are_refused_without_a_model(key):
    with pytest.raises(TypeError, match=rf"{key} needs .*Muon\.for_model\(model, {key}"):
        ds_ext.Muon(matrices("x").values(), **{key: None})


def test_a_rule_may_have_a_hyper_parameter_of_such_a_name():
    @dataclass(frozen=True)
    class LOMO(REGISTRY["lomo"].rule):  # rules are known by their names
        others: hyperparams.Positive = 1.0

    made = type("LOMO", (RuleOptimizer,), {"rule": LOMO})
    (group,) = made(matrices("x").values(), lr=0.1, others=2.0).param_groups
    assert group["others"] == 2.0


@pytest.mark.parametrize("name", RULES)
def test_a_step_count_that_is_a_tensor_is_loaded(name):
    made_of = []
    for kind in (int, lambda step: torch.tensor(float(step))):
        params = matrices()
        optimizer = made(name, list(params.values()))
        for seed in (1, 2):
            stepped(optimizer, params, seed)
        saved = copy.deepcopy(optimizer.state_dict())
        given = [state for state in saved["state"].values() if "step" in state]
        for state in given:
            state["step"] = kind(state["step"])
        kept = [state["step"] for state in given]
        optimizer.load_state_dict(saved)
        assert [state["step"] for state in given] == kept  # what was given is as it was
        stepped(optimizer, params, 3)
        made_of.append(params)
    assert all(torch.equal(made_of[0][n], made_of[1][n]) for n in "xyz")


EMPTY = ((0,), (0, 3), (3, 0), (2, 0, 3))
WAYS = [(path, None) for path in ("ops", "native", *["kernels"][: needs.TRITON])]
WAYS += [("native", how) for how in ({}, {"gradient_policy": "sharded"}, {"max_grad_norm": 1.0})]


@pytest.mark.parametrize("name, path, how", crossed(RULES, WAYS))
def test_parameters_without_elements_are_stepped(name, path, how, monkeypatch):
    paths.use(monkeypatch, path)
    model = torch.nn.Linear(3, 4, bias=False)
    model.empty = torch.nn.ParameterList(map(torch.zeros, shapes_of(name, EMPTY)))
    optimizer = OPTIMIZERS[name](model.parameters())
    fused = None if how is None else ds_ext.fuse_into_backward(model, optimizer, **how)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum() + sum(p.sum() for p in model.empty)
        loss.backward() if fused is None else fused.backward(loss)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(x.isfinite().all() for x in (model.weight, *tensors(optimizer.state_dict())))


@pytest.mark.parametrize("name", RULES)
def test_distributed_checkpoint_makes_states_by_a_step_of_rate_0(name):
    models = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    before = models[0].weight.detach().clone()
    get_state_dict(models[0], optimizers[0])
    assert torch.equal(models[0].weight, before)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        optimizer.step()

    step(models[0], optimizers[0])
    saved = get_state_dict(models[0], optimizers[0])
    set_state_dict(models[1], optimizers[1], model_state_dict=saved[0], optim_state_dict=saved[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    assert torch.equal(models[0].weight, models[1].weight)
    assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"] != 0


def test_wrong_arguments_raise_what_torch_raises():
    x = matrices("x")["x"]
    y = matrices("y")["y"]
    for given, kind in (
        (x, TypeError),
        ([{"params": x}, {"params": x}], ValueError),
        ([("x", x), y], ValueError),
        ([{"params": [x]}, {"params": [("y", y)]}], ValueError),
        ([{"params": {x}}], TypeError),
        ([x, 3], TypeError),
        ([], ValueError),
    ):
        errors = []
        for optimizer_type in (ds_ext.AdaLomo, torch.optim.AdamW):
            with pytest.raises(kind) as info:
                optimizer_type(copy.copy(given))
            errors.append(str(info.value))
        assert errors[0].startswith(errors[1])
    with pytest.raises(TypeError, match="must be a dict"):
        ds_ext.AdaLomo([x]).add_param_group([y])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        ds_ext.AdaLomo([x, x])
    with pytest.raises(ValueError, match="lr is tensor"):
        ds_ext.AdaLomo([x], lr=torch.tensor([0.1, 0.2]))


SHAPES = ((), (300,), (13, 40), (3, 7, 20))
GALORE = {"lr": 0.02, "rank": 3, "update_proj_gap": 2}
CASES = {name: (name, SETTINGS[name]) for name in FOR_ALL} | {
    "projected": ("galoreadamw", GALORE),
    "8 bits": ("galoreadamw", GALORE | {"nbits": 8, "min_8bit_size": 16}),
}
MAKERS = {
    *("tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye"),
    *("rand", "randn", "randint", "randperm", "as_tensor", "scalar_tensor", "empty_strided"),
}

TABLES = ("ops", "kernels") if needs.TRITON else ("ops",)
# Kernels: rules that ask for different passes, of which `make test` runs two.
KERNELS, FEW = ("lomo", "adalomo", "lamb", "flashadamw", "8 bits"), ("lomo", "8 bits")
PATHS_OF_CASES = [
    way for way in itertools.product(CASES, TABLES) if way[1] == "ops" or way[0] in KERNELS
]


@pytest.fixture
def defaults():
    """Sets a default dtype, and a device on which nothing can be computed."""

    def forget():
        for cached in (rounding.shifted_noise, quantize._book):
            cached.cache_clear()

    def turn(on):
        torch.set_default_dtype(torch.bfloat16 if on else torch.float32)
        torch.set_default_device("meta" if on else None)

    forget()
    yield turn
    turn(False)
    forget()


STORED = pytest.mark.parametrize(
    "dtype, mode", [(torch.float32, "nearest"), (torch.bfloat16, "master")]
)


@pytest.mark.parametrize(
    "case, path", params(PATHS_OF_CASES, lambda way: way[1] == "ops" or way[0] in FEW)
)
@STORED
def test_steps_have_the_same_bits(case, path, dtype, mode, defaults, monkeypatch):
    """Trains by a rule with torch's defaults and with others, and compares the weights."""
    paths.use(monkeypatch, path)
    if "8 bits" in case:
        pytest.importorskip("bitsandbytes")
    name, hypers = CASES[case]

    def trained(on):
        params = [nn.Parameter(p) for p in table.weights(SHAPES, dtype)]
        gradients = table.gradients(2, SHAPES, dtype)
        optimizer = OPTIMIZERS[name](params, **hypers, weight_update=mode)
        defaults(on)
        plain.steps(optimizer, params, gradients)
        defaults(False)
        return [p.detach() for p in params]

    assert all(map(torch.equal, trained(True), trained(False)))


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Calls of the package to functions of ``torch``."""
    for path in sorted(Path(ds_ext.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and ast.unparse(node.func.value) == "torch":
                yield path, node


def test_nothing_is_allocated_without_a_dtype_and_a_device():
    found = []
    for path, call in calls():
        given = {keyword.arg for keyword in call.keywords}  # None for a mapping
        if call.func.attr in MAKERS and None not in given and not {"dtype", "device"} <= given:
            found.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
        # of two numbers it makes a tensor of the default dtype
        if call.func.attr == "where" and all(
            isinstance(x, ast.Constant) or ast.unparse(x).isupper() for x in call.args[1:]
        ):
            found.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert not found, "\n".join(found)
