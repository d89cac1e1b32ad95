"""What ``register`` and ``state_spec`` refuse: classes, fields, names and keys."""

import enum
from dataclasses import dataclass, fields, make_dataclass
from typing import Literal

import pytest
import torch

import ds_ext
from ds_ext import hyperparams, rules
from ds_ext.hyperparams import NonNegative
from ds_ext.ops.sixteen_bit import RoundingConfig
from ds_ext.ops.state import Part
from ds_ext.optimizer.ema import EMA, EmaConfig
from ds_ext.optimizer.expert_stacks import EXPERTS
from ds_ext.optimizer.sections import SectionConfig
from ds_ext.rules import base
from tests.common.own_rule import registered


def nothing(self, p, g, s, t, shard):
    pass


def test_another_rule_of_the_same_name_is_refused():
    with pytest.raises(ValueError, match="named AdaLomo is registered already"):
        rules.register(paper="", state="", rounds="")(type("AdaLomo", (), {}))


@pytest.mark.parametrize("name", ["RuleOptimizer", "ops", "FuseCallback"])
def test_a_name_of_ds_ext_that_is_no_optimizer_is_refused(name):
    with pytest.raises(ValueError, match=f"ds_ext.{name} exists and is no opt.*: rename the class"):
        rules.register(paper="", state="", rounds="")(type(name, (), {}))


SWAPPED = [lambda self, p, g, s, shard, t: None, lambda self, p, g, s, shard: None]


@pytest.mark.parametrize("step", SWAPPED)
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


def test_a_class_that_is_no_rule_is_refused():
    with pytest.raises(TypeError, match="Own lacks @dataclass.*, the method st"):
        rules.register(paper="", state="", rounds="")(type("Own", (), {}))
    thawed = dataclass(type("Own", (), {"state_spec": 0, "step": 0}))
    with pytest.raises(TypeError, match="Own lacks frozen=True of its @dataclass"):
        rules.register(paper="", state="", rounds="")(thawed)
    with pytest.raises(TypeError, match="Own lacks the method step."):
        plain = type("Own", (), {"__annotations__": {"lr": float}, "state_spec": 0})
        own = dataclass(frozen=True)(plain)
        rules.register(paper="", state="", rounds="")(own)
    own.step = lambda: None
    with pytest.raises(TypeError, match="Own lacks a default of the field lr."):
        rules.register(paper="", state="", rounds="")(own)


RATE = ("lr", NonNegative, 0.1)
UNCHECKED = "lacks a type of the field lr that says which values"
FIELDS = [
    ([("lr", hint, 0.1)], TypeError, UNCHECKED)
    for hint in (float, int, tuple[float, float], NonNegative | str)
]
RESERVED = "Odd has a hyper-parameter named {}, which ds_"
FIELDS += [
    ([RATE, (name, NonNegative, 5)], ValueError, RESERVED.format(name))
    for name in sorted(base.RESERVED_FIELDS)
]


@pytest.mark.parametrize("own, error, words", FIELDS)
def test_fields_that_nobody_checks_or_that_ds_ext_uses_are_refused(own, error, words):
    body = {"state_spec": nothing, "step": nothing, "__module__": __name__}
    rule = make_dataclass("Odd", own, namespace=body, frozen=True)
    with pytest.raises(error, match=words):
        rules.register(paper="", state="", rounds="")(rule)
    assert "odd" not in rules.REGISTRY


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
