"""docs/adding-an-optimizer.md: its code is run, and gives an optimizer like any other."""

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass

import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

import ds_ext
from ds_ext import ops, rules
from ds_ext.config import optimizer_names
from ds_ext.ops.joint import Joint
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory
from ds_ext.testing import check_rule
from tests.common.authors import InFP64
from tests.common.own_rule import registered
from tests.tools import snippets

PAGE = snippets.ROOT / "docs/adding-an-optimizer.md"
HYPERS = {"lr": 0.03, "momentum": 0.6, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    file = tmp_path_factory.mktemp("page") / "signsgd.py"
    file.write_text("\n".join(codes))
    spec = importlib.util.spec_from_file_location("signsgd", file)
    sys.modules["signsgd"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del rules.REGISTRY["signsgd"], rules.REGISTRY["heavyball"], sys.modules["signsgd"]


def sign_sgd(p, g, s, lr, momentum, weight_decay):
    m = s["m"] = momentum * s.get("m", 0) + (1 - momentum) * g
    alpha = lr * p.square().mean().sqrt()
    return p * (1 - alpha * weight_decay) - alpha * m.sign()


def heavy_ball(p, g, s, lr, momentum, weight_decay):
    m = s["m"] = momentum * s.get("m", 0) + g
    return p * (1 - lr * weight_decay) - lr * m


@pytest.mark.parametrize("name, formula", [("SignSGD", sign_sgd), ("HeavyBall", heavy_ball)])
def test_its_rules_have_all_properties_and_the_steps_of_their_formulas(page, name, formula):
    reference = functools.partial(InFP64, formula, **HYPERS)
    check_rule(getattr(page, name)(**HYPERS), reference=reference)


def test_its_own_test_passes(page):
    page.test_heavy_ball()


def test_deepspeed_and_the_planner_know_it(page):
    assert optimizer_names.concerns_us({"optimizer": {"type": "SignSGD"}})
    assert "SignSGD" in dir(ds_ext)
    rule = OPTIMIZERS["signsgd"].hypers()
    assert memory.optimizer_memory(rule, {"a": (7, 5)}, None, 1, torch.float32, 1).state == 4 * 35
    with pytest.raises(ValueError, match="momentum is 1.5; allowed: a number in"):
        ds_ext.SignSGD([torch.nn.Parameter(torch.zeros(3))], momentum=1.5)


def one_step(dtype, is_fused):
    model = torch.nn.Linear(5, 7).to(dtype)
    optimizer = ds_ext.Own(model.parameters())
    if is_fused:
        ds_ext.fuse_into_backward(model, optimizer)
    model(torch.ones(2, 5, dtype=dtype)).float().square().sum().backward()
    optimizer.step()
    return model.weight.detach(), optimizer.state[model.weight]


@pytest.mark.parametrize("name", snippets.examples())
def test_examples_of_operations_run(name):
    code = snippets.examples()[name][1]
    names = {"ops": ops}
    exec(f"def step(self, p, g, s, t, shard):\n    {code}\n    yield from ()", names)
    with registered(names["step"]):
        weight, state = one_step(torch.float32, False)
    assert weight.isfinite().all() and all(state[key].isfinite().all() for key in "mv")


PLAIN = {"method": lambda p, g, s: s["m"].mul_(0.9).add_(g)}
PLAIN |= {"function": lambda p, g, s: torch.sign(g), "operator": lambda p, g, s: 2 * g}
PLAIN |= {"attribute": lambda p, g, s: g.square(), "weight": lambda p, g, s: p.sub_(g, alpha=0.1)}
PLAIN |= {"index": lambda p, g, s: g[:3]}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("operation", PLAIN)
def test_plain_operations_on_a_gradient_raise_on_every_path(operation, is_batched, dtype, is_fused):
    """An engine divides gradients by the ranks: they are ``ops.Scaled`` there, and here."""

    def step(self, p, g, s, t, shard):
        PLAIN[operation](p, g, s)

    with registered(step, is_batched), pytest.raises((TypeError, AttributeError)) as raised:
        one_step(dtype, is_fused)
    assert "cannot read it: p and g of a rule" in str(raised.value)
    assert "is the m of m = beta * m + g" in str(raised.value)
    assert "such as a Part.whole, leaves is_batched out" in str(raised.value)


def by_joint(self, p, g, s, t, shard):
    (half,) = yield Joint(lambda x: (x / 2,), ops.square_sum(g, shard, g))
    (total,) = yield (half,)
    ops.apply_(p, g, shard, lr=self.lr * total)


def after_an_empty_round(self, p, g, s, t, shard):
    yield ()
    (total,) = yield (ops.square_sum(g, shard, g),)
    ops.apply_(p, g, shard, lr=self.lr * total)


@pytest.mark.parametrize("sums_first", [True, lambda rule, shard: shard.numel > 20])
@pytest.mark.parametrize("step", [by_joint, after_an_empty_round])
def test_first_rounds_that_check_gradients_change_no_step(step, sums_first):
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        sizes = [(4, 3), (3, 8), (8, 3)]  # of which one has 12 elements
        model = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes))
        with registered(step, True, sums_first=sums_first):
            optimizer = ds_ext.Own(model.parameters(), lr=1e-2)
            if is_fused:
                ds_ext.fuse_into_backward(model, optimizer, bucket_size=1000)
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            model(torch.ones(5, 4)).square().sum().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found) and not torch.equal(before, found[0])


def test_what_a_rule_yields_is_a_tuple():
    def step(self, p, g, s, t, shard):
        yield ops.square_sum(g, shard, g)

    with registered(step), pytest.raises(TypeError, match="yields a Tensor; allowed: a tuple"):
        one_step(torch.float32, False)


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
def test_totals_that_are_not_unpacked_are_named_once(is_batched, is_fused):
    with registered(not_unpacked, is_batched), pytest.raises(TypeError) as raised:
        one_step(torch.float32, is_fused)
    assert str(raised.value).count("write (total,) = yield (x,)") == 1


@dataclass(frozen=True)
class Quotient:
    """g / |g|, which is NaN where g is 0."""

    g: ops.Readable

    def block(self, b):
        return ops.read(self.g, b) / ops.read(self.g, b).abs()


def own_sums(self, p, g, s, t, shard):
    own = ops.square_sum(g, shard, g)
    yield (own,)
    ops.apply_(p, g, shard, lr=self.lr / (1 + own))


def divided_by(divisor):
    """A step whose rate is divided by a function of a total and the shard."""

    def step(self, p, g, s, t, shard):
        (total,) = yield (ops.square_sum(g, shard, g),)
        ops.apply_(p, g, shard, lr=self.lr / divisor(total, shard))

    return step


size_of_the_run = divided_by(lambda total, shard: 1 + total / max(len(shard), 1))
mixed_in_a_batch = divided_by(lambda total, shard: 1 + total.mean())
branch = divided_by(lambda total, shard: 2 if total > 1 else 1)


def not_everywhere(self, p, g, s, t, shard):
    if len(shard):  # a rank may have an empty run
        yield (ops.square_sum(g, shard, g),)
    ops.apply_(p, g, shard, lr=self.lr)


def other_dtype(self, p, g, s, t, shard):
    s["m"] = s["m"].bfloat16()
    ops.apply_(p, g, shard, lr=self.lr)


def other_state(self, p, g, s, t, shard):
    s["more"] = s["m"].clone()
    ops.apply_(p, g, shard, lr=self.lr)


KEPT = WeakIdKeyDictionary()


def kept_elsewhere(self, p, g, s, t, shard):
    m = KEPT.setdefault(s["m"], torch.zeros_like(s["m"]))
    ops.lerp_(m, g, 0.5, shard)
    ops.apply_(p, m, shard, lr=self.lr)


def zero_by_zero(self, p, g, s, t, shard):
    ops.apply_(p, Quotient(g), shard, lr=self.lr)


def by_dtype(self, p, g, s, t, shard):
    ops.apply_(p, g, shard, lr=self.lr * (2 if g.dtype == torch.float16 else 1))


def nothing(self, p, g, s, t, shard):
    ops.lerp_(s["m"], g, 0.5, shard)


def plain_weight(self, p, g, s, t, shard):
    p.mul_(0.99)  # an fp32 weight that is stepped alone is a tensor


def writes_first(self, p, g, s, t, shard):
    ops.lerp_(s["m"], g, 0.5, shard)
    (total,) = yield (ops.square_sum(g, shard, g),)
    ops.apply_(p, s["m"], shard, lr=self.lr / (1 + total))


def undeclared(self, p, g, s, t, shard):
    ops.lerp_(s["w"], g, 0.5, shard)


def returned(self, p, g, s, t, shard):
    return s["m"]


def number(self, p, g, s, t, shard):
    (total,) = yield (1.0,)
    ops.apply_(p, g, shard, lr=self.lr * total)


def not_unpacked(self, p, g, s, t, shard):
    total = yield (ops.square_sum(g, shard, g),)
    ops.apply_(p, g, shard, lr=self.lr * torch.sqrt(total))


def own_rate(self, p, g, s, t, shard):
    ops.apply_(p, g, shard, lr=type(self).lr)


@dataclass(frozen=True)
class InPlace:
    """The sign of a run, which it overwrites."""

    x: ops.Readable

    def block(self, b):
        return ops.read(self.x, b).sign_()


def in_place(self, p, g, s, t, shard):
    ops.lerp_(s["m"], g, 0.1, shard)
    ops.apply_(p, InPlace(s["m"]), shard, lr=self.lr)


def evaluated(self, p, g, s, t, shard):
    ops.evaluate(g, shard, g)
    ops.apply_(p, g, shard, lr=self.lr)


FAULTS = {
    own_rate: r"has another update if lr changes \(step reads self.lr, as in ops.apply_",
    in_place: "does not write to results of ops.read, such as by .sign_.*: shape",
    evaluated: "ops.blocks and ops.evaluate read one parameter, and no batch.",
    undeclared: r"Own lacks .*: it runs: KeyError\('w'\) \(state_spec does not declare it\)",
    returned: "Own.step returned Tensor: return nothing, and write the weight with ops.apply_",
    not_unpacked: r"not tuple. yield returns a tuple, .*: write \(total,\) = yield \(x,\)$",
    number: "yields .'float'.; allowed: tensors",
    branch: "Own lacks .*: it runs: .*a total is a vector in a batch: write torch.where",
    nothing: r"changes the weight: shape .*ops.apply_ writes it",
    plain_weight: "mul_ cannot read it: p and g of a rule",
    writes_first: "yields before it writes, as sums_first says: shape",
    own_sums: "is the same on 2 ranks as on one: .* a total is missing or not used",
    size_of_the_run: "is the same on 2 ranks as on one: .* divides by len",
    not_everywhere: "yields equally often, and sums of equal sizes, on all ranks: 2 ranks",
    other_dtype: "keeps the state that state_spec declares: .*is torch.bfloat16 and not torch.f",
    other_state: "keeps the state that state_spec declares: .*other keys, .*'more'",
    kept_elsewhere: "resumes with the same bits: .*step keeps something outside its state",
    zero_by_zero: "stays finite where gradients are zero: shape",
    by_dtype: "works with torch.float16 weights as with fp32: shape",
    mixed_in_a_batch: "is the same in a batch as alone: shape",
}


def without_decay(self, p, g, s, t, shard):
    yield ()
    ops.apply_(p, g, shard, lr=self.lr)


def test_a_weight_decay_that_no_step_reads_is_named(page, monkeypatch):
    monkeypatch.setattr(page.HeavyBall, "step", without_decay)
    with pytest.raises(AssertionError, match="if weight_decay changes .step reads self.weight_d"):
        check_rule(page.HeavyBall)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_each_kind_is_named(fault):
    is_batched = fault in (mixed_in_a_batch, writes_first, branch, evaluated)
    with registered(fault, is_batched, sums_first=fault is writes_first) as rule:
        with pytest.raises((AssertionError, AttributeError, TypeError), match=FAULTS[fault]):
            check_rule(rule)


def test_a_rule_that_is_not_registered_is_named():
    with registered(nothing) as rule:
        pass
    with pytest.raises(ValueError, match="Own is not registered: put @register"):
        check_rule(rule)


@pytest.mark.parametrize("parts", [{"m": torch.zeros(3)}, {"v": {"m": 3}}, None])
def test_a_state_that_is_not_declared_by_parts_is_named(parts):
    with registered(nothing) as rule:
        rule.state_spec = lambda self, shard: parts
        for make in (check_rule, lambda _: ds_ext.Own([torch.nn.Parameter(torch.zeros(3))])):
            with pytest.raises(TypeError, match="Own.state_spec returned .* dict of parts"):
                make(rule)


def test_a_rule_and_its_optimizer_are_not_mistaken_for_each_other():
    with registered(nothing) as rule:
        with pytest.raises(TypeError, match=r"The optimizer is ds_ext.Own\(params, lr=...\)"):
            rule([torch.nn.Parameter(torch.zeros(3))])
        with pytest.raises(TypeError, match="missing 5 required positional arguments"):
            rule(lr=0.1).step()
        with pytest.raises(TypeError, match="give the rule Own of your module, not the optimizer"):
            check_rule(ds_ext.Own)
    with pytest.raises(AttributeError, match="no attribute 'Own'. Import the module of your"):
        _ = ds_ext.Own


def test_another_formula_than_the_references_is_named(page):
    words = "HeavyBall lacks a .* equals its reference: shape .* of the update, allowed 1e-09"
    with pytest.raises(AssertionError, match=words):
        check_rule(page.HeavyBall, reference=lambda params: torch.optim.SGD(params, lr=1e-3))
