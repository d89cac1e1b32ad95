"""Rules as plain torch optimizers: step, groups, schedulers, saved state, and what is refused; what
``register`` and ``state_spec`` refuse."""

import dataclasses
import enum
import inspect
import re
from dataclasses import fields, make_dataclass
from typing import Literal

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import hyperparams, ops, rules
from ds_ext.hyperparams import NonNegative
from ds_ext.ops.shard import Shard
from ds_ext.ops.sixteen_bit import RoundingConfig
from ds_ext.ops.state import Part
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.ema import EMA, EmaConfig
from ds_ext.optimizer.expert_stacks import EXPERTS
from ds_ext.optimizer.sections import SectionConfig
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY, base
from tests.common import authors, table
from tests.common.hypers import FOR_ALL, SIMULATED
from tests.common.own_rule import registered
from tests.common.plain import steps
from tests.common.simulated import errors
from tests.common.states import same
from tests.common.table import RULES, SHAPES


def parameters(dtype=torch.float64, shapes=SHAPES):
    return [nn.Parameter(p) for p in table.weights(shapes, dtype)]


@pytest.mark.supports("hyper-parameters per parameter group", stage=None, optimizer="name")
@pytest.mark.parametrize("name", RULES)
def test_groups_have_their_own_hyper_parameters(name):
    shapes = [(3, 5), (5,), (4, 3, 5)]
    own = [{"lr": 0.3}, {}, {"lr": 0.005, "weight_decay": 0.5}]
    params, gradients = parameters(shapes=shapes), table.gradients(5, shapes)
    groups = [{"params": [p]} | g for p, g in zip(params, own, strict=True)]
    optimizer = OPTIMIZERS[name](groups[:2], **SIMULATED[name])
    optimizer.add_param_group(groups[2])
    theirs = [nn.Parameter(p) for p in table.weights(shapes)]
    groups = [{"params": [p]} | g for p, g in zip(theirs, own, strict=True)]
    steps(optimizer, params, gradients)
    steps(authors.ordinary(name, groups, SIMULATED[name]), theirs, gradients)
    assert max(errors(params, theirs, table.weights(shapes))) <= 1e-9


def test_a_batch_steps_gradients_with_factors_of_their_own():
    """As tensor parallelism has them: parameters that it replicates have another divisor."""
    params = parameters(torch.float32, [(8, 8), (5,), (3, 4)])
    before, gradients = [p.detach().clone() for p in params], [torch.ones_like(p) for p in params]
    optimizer, factors = ds_ext.LOMO(params, lr=0.5), [1.0, 0.25, torch.tensor(2.0)]
    for some in (slice(0, 2), slice(0, 3)):
        updates = [
            RunUpdate(
                p,
                p.detach().view(-1),
                g.view(-1) if factor == 1 else ops.Scaled(g.view(-1), factor),
                Shard.whole(tuple(p.shape)),
            )
            for p, g, factor in zip(params[some], gradients[some], factors[some], strict=True)
        ]
        optimizer.update(updates, None)
    moved = [float((old - p.detach()).mean()) for old, p in zip(before, params, strict=True)]
    assert moved == pytest.approx([2 * 0.5, 2 * 0.125, 1.0], rel=1e-6)


def test_groups_of_a_scheduled_optimizer_make_another():
    params = parameters(shapes=[(3, 5)])
    optimizer = ds_ext.AdaLomo(params, lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    (group,) = ds_ext.AdaLomo(optimizer.param_groups).param_groups
    assert (group["lr"], group["initial_lr"]) == (0.25, 0.5)


@pytest.mark.parametrize("name", FOR_ALL)
def test_weights_and_gradients_that_are_not_contiguous(name):
    torch.manual_seed(0)
    x, y, z = (torch.randn(shape).double() for shape in ((7, 4), (5, 6, 8), (2, 3, 4, 5)))
    views = [x.t(), y[:, ::2, 1::3], z.to(memory_format=torch.channels_last)]
    views = [nn.Parameter(v) for v in views]
    dense = [nn.Parameter(v.detach().contiguous().clone()) for v in views]
    before = [v.detach().clone() for v in views]
    assert not any(v.is_contiguous() for v in views)
    places = [(v.data_ptr(), v.stride()) for v in views]
    optimizers = [OPTIMIZERS[name](p, **SIMULATED[name]) for p in (views, dense)]
    for _ in range(3):
        for v, d in zip(views, dense, strict=True):
            d.grad = torch.randn(d.shape, dtype=torch.float64)
            v.grad = torch.empty_like(v).copy_(d.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert same(views, dense) and not any(map(torch.equal, views, before))
    assert [(v.data_ptr(), v.stride()) for v in views] == places


WARMUP = {"warmup_init": True, "relative_step": False, "lr": 1e-3}
REFUSED = [
    # (optimizer, hyper-parameters, what the message must hold): each kind of value once. The
    # reference page and ds_ext/__init__.pyi hold each key's kind and default.
    ("lomo", {"weight_decy": 0.1}, ["LOMO", "optimizer.params.weight_decy", '"weight_decay"?']),
    ("adalomo", {"qqqq": 1}, ["optimizer.params.qqqq", "Known: lr, eps, clip_threshold"]),
    ("lomo", {"lr": "fast"}, ["optimizer.params.lr is 'fast'", "a number >= 0"]),
    ("lomo", {"lr": -0.5}, ["optimizer.params.lr is -0.5", "a number >= 0"]),
    ("lomo", {"lr": True}, ["optimizer.params.lr is True", "a number >= 0"]),
    ("lomo", {"lr": float("nan")}, ["optimizer.params.lr is nan", "a number >= 0"]),
    ("lomo", {"lr": "auto"}, ["optimizer.params.lr is 'auto'", "HF Trainer", "write a value"]),
    ("adalomo", {"clip_threshold": 0}, ["clip_threshold is 0;", "a number > 0"]),
    ("adalomo", {"decay_rate": 0.8}, ["decay_rate is 0.8", "a number < 0"]),
    ("adalomo", {"eps": 1e-8}, ["eps is 1e-08", "a list of 2: [a number >= 0, a numb", "Adam"]),
    ("adalomo", {"eps": [1e-30, -1e-3]}, ["eps is [1e-30, -0.001]", "a list of 2"]),
    ("adafactor", {"beta1": 1.0}, ["beta1 is 1.0", "a number in [0, 1) or null"]),
    ("adafactor", {"relative_step": 0, "lr": 1.0}, ["relative_step is 0", "true or false"]),
    ("adafactor", {"lr": 1e-3}, ["Adafactor", "lr=0.001", "relative_step", "to false"]),
    ("adafactor", {"relative_step": False}, ["Adafactor", "lr is missing"]),
    ("adafactor", WARMUP, ["warmup_init=true needs relative_step=true"]),
    ("adafactor", {"nbits": 8}, ["nbits=8 needs beta1: without momentum"]),
    ("came", {"betas": [0.9, 0.999]}, ["betas is [0.9, 0.999]", "a list of 3: [a num", "Adam"]),
    ("lomo", {"weight_update": "exact"}, ["'exact'", '"nearest", "master" or "master24"']),
    ("lomo", {"seed": -1}, ["LOMO: optimizer.params.seed is -1", "a whole number >= 0"]),
    ("lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, ["min_coeff=2.0 is larger than max_coeff=1.0"]),
    ("sinkgd", {"spectral": "muon"}, ["spectral was removed in ds_ext 1.1: remove it."]),
    ("apollo", {"rank": 0}, ["rank is 0; allowed: a whole number > 0"]),
    ("muon", {"ns_coefficients": (1.0, 2.0)}, ["ns_coefficients is (1.0, 2.0)", "a list of 3"]),
    ("muon", {"ns_coefficients": [[]]}, ["ns_coefficients is [[]]; allowed: a list of 3 numbers"]),
    ("galoreadamw", {"rank": 2.5}, ["rank is 2.5; allowed: a whole number > 0"]),
    ("galoreadamw", {"nbits": 4}, ["nbits is 4; allowed: 8 or 32"]),
]


def message(make):
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("name, hypers, parts", REFUSED)
def test_what_is_refused(name, hypers, parts):
    cls = OPTIMIZERS[name]
    (param,) = parameters(shapes=[(3, 5)])
    by_config = message(lambda: hyperparams.check(cls.hypers, hypers))
    assert all(part in by_config for part in parts), by_config
    made = message(lambda: cls([param], **hypers))
    assert re.sub(r"optimizer\.params\.| \(optimizer\.params\)", "", by_config).startswith(made)
    if "qqqq" in hypers:
        return  # a group may have it, for others to read
    assert message(lambda: cls([{"params": [param]} | hypers])) == made
    valid = cls(parameters(shapes=[(5,)]))
    assert message(lambda: valid.add_param_group({"params": [param]} | hypers)) == made
    assert len(valid.param_groups) == 1


def test_groups_round_their_own_way():
    (a, b) = parameters(torch.bfloat16, shapes=[(3, 5), (3, 5)])
    groups = [{"params": [a], "weight_update": "nearest"}, {"params": [b], "seed": 7}]
    optimizer = ds_ext.AdaLomo(groups, weight_update="master")
    steps(optimizer, [a, b], table.gradients(1, [(3, 5), (3, 5)]))
    assert "master" not in optimizer.state[a] and "master" in optimizer.state[b]
    assert [group["seed"] for group in optimizer.param_groups] == [0, 7]


WRITING = {"weight_update": "stochastic", "seed": 0, "ema_decay": 0.0, "ema_dtype": "fp32"}


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if not REGISTRY[n].has_sections])
def test_the_signature_shows_hyper_parameters_and_defaults(name):
    cls = OPTIMIZERS[name]
    own = {field.name: field.default for field in dataclasses.fields(REGISTRY[name].rule)}
    first, *rest = inspect.signature(cls).parameters.values()
    assert first.name == "params"
    assert {p.name: p.default for p in rest} == own | WRITING
    assert {p.kind for p in rest} == {inspect.Parameter.KEYWORD_ONLY}
    (group,) = cls(params=[torch.zeros(1)]).param_groups  # by keyword, as torch's take them
    assert {k: v for k, v in group.items() if k != "params"} == own | WRITING
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="give model.parameters"):
        cls(model)
    with pytest.raises(TypeError, match=rf"{cls.__name__}.for_model\(model, lr=...\)"):
        cls.for_model(model, 0.1)
    with pytest.raises(TypeError, match="for_model: give the model"):
        cls.for_model(model.parameters())
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(params, lr=...\)"):
        cls([torch.zeros(1)], 0.1)


def nothing(self, p, g, s, t, shard):
    pass


@pytest.mark.parametrize(
    "step", [lambda self, p, g, s, shard, t: None, lambda self, p, g, s, shard: None]
)
def test_another_order_of_the_parameters_of_step_is_refused(step):
    with pytest.raises(TypeError, match="Own.step takes .*'shard'.*; allowed: .*, in this order"):
        with registered(step):
            pass


def test_a_wrong_call_of_register_says_how_it_is_written():
    texts = {"paper": "", "state": "", "rounds": ""}
    with pytest.raises(TypeError, match="too many positional arg.* Write it as @register"):
        rules.register(base.RuleEntry)
    with pytest.raises(TypeError, match="'batched'. Did you mean \"is_batched\".* Write it as"):
        rules.register(**texts, batched=True)


def made(*fields, frozen=True):
    """A class as users write it, which may lack something."""
    body = {"state_spec": nothing, "step": nothing, "__module__": __name__}
    return make_dataclass("Own", fields, namespace=body, frozen=frozen)


RATE = ("lr", NonNegative, 0.1)
UNFIT = [
    (type("AdaLomo", (), {}), ValueError, "named AdaLomo is registered already"),
    (type("Own", (), {}), TypeError, "Own lacks @dataclass.*, the method st"),
    (made(RATE, frozen=False), TypeError, "Own lacks frozen=True of its @dataclass"),
    (made(("lr", NonNegative)), TypeError, "Own lacks a default of the field lr."),
    (
        make_dataclass("Own", [RATE], namespace={"state_spec": nothing}, frozen=True),
        TypeError,
        "Own lacks the method step.",
    ),
]
UNFIT += [
    (type(name, (), {}), ValueError, f"ds_ext.{name} exists and is no opt.*: rename the class")
    for name in ("RuleOptimizer", "ops", "FuseCallback")
]
UNCHECKED = "lacks a type of the field lr that says which values"
UNFIT += [
    (made(("lr", hint, 0.1)), TypeError, UNCHECKED)
    for hint in (float, int, tuple[float, float], NonNegative | str)
]
RESERVED = "Own has a hyper-parameter named {}, which ds_"
UNFIT += [
    (made(RATE, (name, NonNegative, 5)), ValueError, RESERVED.format(name))
    for name in sorted(base.RESERVED_FIELDS)
]


@pytest.mark.parametrize("rule, error, words", UNFIT)
def test_classes_that_are_no_rules_are_refused(rule, error, words):
    """Also their fields that nobody checks, and names that ds_ext uses."""
    with pytest.raises(error, match=words):
        rules.register(paper="", state="", rounds="")(rule)
    assert "own" not in rules.REGISTRY


@pytest.mark.parametrize("key", sorted(base.RESERVED_STATE))
def test_keys_of_the_state_that_ds_ext_uses_are_refused(key):
    with registered(nothing) as rule:
        rule.state_spec = lambda self, shard: {"m": Part.like(shard), key: Part.like(shard)}
        with pytest.raises(ValueError, match=f'the state of Own has the key "{key}", which ds_ext'):
            ds_ext.Own([torch.nn.Parameter(torch.zeros(3))])


def test_the_reserved_names_are_those_in_use():
    configs = (RoundingConfig, EmaConfig, SectionConfig)
    used = {field.name for config in configs for field in fields(config)}
    assert used | {"params", "name", "type"} == base.RESERVED_FIELDS
    assert {EMA, EXPERTS, "master", "marks", "step"} == base.RESERVED_STATE


def test_a_choice_between_members_of_an_enum_is_refused_by_its_key():
    kind = enum.Enum("Kind", ["FIRST", "SECOND"])
    rule = make_dataclass("Own", [("kind", Literal[kind.FIRST, kind.SECOND], kind.FIRST)])
    assert hyperparams.check(rule, {"kind": kind.SECOND})["kind"] is kind.SECOND
    with pytest.raises(ValueError, match='kind is 3; allowed: "Kind.FIRST" or "Kind.SECOND".'):
        hyperparams.check(rule, {"kind": 3})
