"""Engines on a model that another one steps, copies of models, and engines that are freed."""

import copy
import functools
import gc
import io
import weakref
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import Tensor, nn

import ds_ext
from tests import worlds
from tests.common import engines, int8_model
from tests.common.choose import params
from tests.common.ranks import logged, message, whole
from tests.common.states import same
from tests.common.updates import check_each
from tests.distributed import expert_parallel_jobs, int8_engines_jobs

STEPS = 3


def make() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 3, 6)).square().mean()


def start(model: nn.Module, stage: int, kept: int, ours: bool = True, **more: Any):
    """An engine; at stage 3 it keeps parameters of up to ``kept`` elements gathered."""
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = ds_ext.LOMO if ours else torch.optim.AdamW
    zero = {"stage3_param_persistence_threshold": kept}
    return engines.start(model, kind(trained, lr=0.1 if ours else 0.01), stage, zero=zero, **more)


def steps(engine, numbers: range) -> dict[str, torch.Tensor]:
    for step in numbers:
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return whole(engine.module)


def second_engine(stage: int, ours: bool, begun: bool) -> dict[str, Any]:
    """An engine, of ours or with AdamW, on the model of one of ours."""
    model = make()
    with logged() as told:
        older = start(model, stage, 10)
        if begun:
            steps(older, range(1))
        before = whole(model)
        newer = start(model, stage, 40, ours)
    after = steps(newer, range(STEPS))
    refused = message(functools.partial(steps, older, range(1)), RuntimeError)
    unmoved = whole(model)
    gone = weakref.ref(older)
    del older
    gc.collect()
    return {
        "before": before,
        "after": after,
        "said": sum("takes over" in line for line in told),
        "refused": refused,
        "unmoved": same(unmoved, after),
        "held": gone() is not None,
    }


def reference(before: dict[str, torch.Tensor], world: int, ours: bool) -> dict[str, torch.Tensor]:
    """What the second engine's steps end with."""
    model = make()
    model.load_state_dict(before)
    kind = torch.optim.SGD if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1 if ours else 0.01)
    return engines.alone(model, optimizer, loss_of, STEPS, world).after


def unfinished(stage: int) -> dict[str, Any]:
    """A second engine while the first waits for a further micro-batch; then after its end."""
    model = make()
    older = start(model, stage, 10, gradient_accumulation_steps=2)
    older.backward(loss_of(older, 0, dist.get_rank()))
    older.step()
    before = whole(model)
    refused = message(lambda: start(model, stage, 10), RuntimeError)
    older.backward(loss_of(older, 1, dist.get_rank()))
    older.step()
    middle = whole(model)
    after = steps(start(model, stage, 10), range(1))
    return {"refused": refused, "moved": not same(before, middle) and not same(middle, after)}


def after_another(how: str, first: int, stage: int) -> dict[str, Any]:
    """An engine of ours on the model of another one, at another stage or not.

    Args:
        how: "scored": it has no optimizer, and has scored the model in inference mode. "ours":
            it has stepped the model. "AdamW": it is torch's, and ends after ours was refused.
        first: The stage of the other engine.
        stage: That of ours.
    """
    model, refused = make(), ""
    if how == "scored":
        other = deepspeed.initialize(model=model, config=engines.config(first))[0]
        with torch.inference_mode():
            loss_of(other, 0, dist.get_rank())
        other.destroy()
    else:
        other = start(model, first, 10, ours=how == "ours")
        steps(other, range(1))
    before = whole(model)
    if how == "AdamW":
        refused = message(lambda: start(model, stage, 10), ValueError)
        assert same(before, whole(model))
        other.destroy()
    try:
        after = steps(start(model, stage, 0 if how == "scored" else 40), range(STEPS))
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": refused, "before": before, "after": after}


def copied(stage: int) -> dict[str, Any]:
    """A copy of the engine's module, made between steps."""
    engine = start(make(), stage, 0)
    steps(engine, range(1))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
    before = whole(engine.module)
    result = {"equal": same(dict(twin.named_parameters()), before)}
    if stage < 3:  # DeepSpeed's own hooks gather what a copy does not have, with AdamW as well
        saved = io.BytesIO()
        torch.save(engine.module, saved)  # cannot be done with AdamW
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False).state_dict()
        result["loaded"] = same(before, loaded)
        called = engine._forward_prologue
        engine._forward_prologue = None  # a copy does not call it
        calls = engine.optimizer.fused.buckets.uses.count.copy()
        loss_of(twin, 1, dist.get_rank()).backward()
        result["grads"] = all(p.grad is not None for p in twin.parameters())
        result["quiet"] = engine.optimizer.fused.buckets.uses.count == calls
        engine._forward_prologue = called
        result["quiet"] &= same(before, whole(engine.module))
    result["goes on"] = not same(before, steps(engine, range(1, 2)))
    return result


class Dense(nn.Module):
    """A model of two layers, which may keep a part of its loss, and so the graph of the first."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        auxiliary = h.square().mean()
        if self.keeps:
            self.auxiliary = auxiliary
        return self.down(h).square().mean() + auxiliary


class Failing(torch.autograd.Function):
    """The identity, whose backward raises ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def _engine(kind: str, stage: int, max_norm: float) -> Any:
    if kind == "int8":
        model = int8_model.made(seed=1)
        return int8_engines_jobs.engine_of(stage, model, gradient_clipping=max_norm)
    if kind == "experts":
        groups._create_expert_and_data_parallel(2)
    model = expert_parallel_jobs.Whole(2) if kind == "experts" else Dense(kind == "keeps")
    found: Any = [{"params": list(model.parameters()), "name": "all"}]
    if kind == "experts":
        found = split_params_into_different_moe_groups_for_optimizer(found)
    optimizer = ds_ext.AdamW(found, lr=1e-3)
    zero = {"reduce_bucket_size": 10**6}  # nothing is stepped before a failure
    return engines.start(model, optimizer, stage, gradient_clipping=max_norm, zero=zero)


def _backward(engine: Any, kind: str) -> None:
    x = int8_model.batch(0, dist.get_rank()) if kind == "int8" else torch.randn(4, 5)
    engine.backward(engine(x))


def _use(engine: Any, kind: str, how: str) -> None:
    for _ in range({"step": 1, "steps": 3, "destroyed": 3}.get(how, 0)):
        _backward(engine, kind)
        engine.step()
    if how == "failure":
        last = list(engine.module.children())[-1]
        hook = last.register_forward_pre_hook(lambda _, x: Failing.apply(*x))
        try:
            _backward(engine, kind)
            raise AssertionError("backward did not fail")
        except ArithmeticError:
            hook.remove()


def _objects(engine: Any) -> dict[str, Any]:
    """Weak references to an engine and its parts."""
    adapter = engine.optimizer
    parts = {"engine": engine, "model": engine.module, "adapter": adapter}
    parts |= {"fused": adapter.fused, "optimizer": adapter.optimizer, "layout": adapter.layout}
    parts |= dict(engine.module.named_parameters())
    states = [x for kept in adapter.state.values() for x in kept.values() if torch.is_tensor(x)]
    parts |= {f"state {i}": x for i, x in enumerate(states)}
    return {name: weakref.ref(part) for name, part in parts.items()}


def left(kind: str, stage: int, how: str, max_norm: float) -> list[str]:
    """The names of an engine's parts that are alive after it was deleted."""
    engine = _engine(kind, stage, max_norm)
    _use(engine, kind, how)
    found = _objects(engine)
    has_stepped = how not in ("nothing", "failure")
    assert ("state 0" in found) == (has_stepped and kind != "int8")  # LOMO has no state
    if how == "destroyed":
        engine.destroy()
    del engine
    # After a failure, autograd keeps nodes that it has not run until its next pass in this thread.
    torch.ones(1, requires_grad=True).square().backward()
    gc.collect()
    return [name for name, part in found.items() if part() is not None]


def outlived() -> str:
    """The error of an access to a parameter whose engine was freed."""
    engine = _engine("dense", 1, 0.0)
    param = engine.module.up.weight
    del engine
    gc.collect()
    return message(lambda: deepspeed.utils.safe_get_full_fp32_param(param))


WORLD = 2


def check(got, ours):
    """Compares a job's steps with those of one process."""
    check_each(got["after"], reference(got["before"], WORLD, ours), got["before"])


TAKEN_OVER = [(s, ours, begun) for s in range(4) for ours in (True, False) for begun in (0, 1)]
QUICK = [(0, True, 0), (1, False, 1), (2, True, 1), (3, True, 0), (3, False, 1)]


@pytest.mark.parametrize("stage, ours, begun", params(TAKEN_OVER, QUICK))
def test_the_newer_engine_takes_over_and_the_older_ends(stage, ours, begun):
    results = worlds.run(WORLD, second_engine, stage, ours, bool(begun))
    assert [got["said"] for got in results] == [1, 0]
    for got in results:
        check(got, ours)
        assert "steps this model now" in got["refused"]
        assert got["unmoved"] and not got["held"]


OTHERS = [("scored", 3, 3), ("ours", 1, 3), ("ours", 2, 0)]
OTHERS += [("AdamW", stage, stage) for stage in (1, 2, 3)]


@pytest.mark.parametrize("how, first, stage", OTHERS)
def test_a_model_that_another_engine_had_is_trained(how, first, stage):
    for got in worlds.run(WORLD, after_another, how, first, stage):
        assert ("call destroy()" in got["refused"]) == (how == "AdamW")  # before its hooks end
        check(got, ours=True)


@pytest.mark.parametrize("stage", params(range(4), (0, 3)))
def test_a_step_in_progress_is_not_taken_over(stage):
    for got in worlds.run(WORLD, unfinished, stage):
        assert "micro-batches" in got["refused"] and "engine.destroy()" in got["refused"]
        assert got["moved"]


@pytest.mark.parametrize("stage", params(range(4), (1, 3)))
def test_a_copy_of_the_module_is_an_ordinary_model(stage):
    for got in worlds.run(WORLD, copied, stage):
        assert all(got.values()), got


@pytest.mark.parametrize("second", range(3))
def test_partitions_of_another_engine_are_refused_below_stage_3(second):
    for got in worlds.run(WORLD, after_another, "ours", 3, second):
        assert f"zero_optimization.stage = {second}" in got["refused"]
        assert "set stage 3" in got["refused"]


# At stage 3, DeepSpeed's nodes in a graph that a module keeps hold the module.
CASES = [("dense", 3), *((kind, stage) for kind in ("keeps", "experts") for stage in range(3))]
CASES += [("int8", 1), ("int8", 3)]


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("how", ["nothing", "step", "steps", "destroyed", "failure"])
@pytest.mark.parametrize("kind, stage", CASES)
def test_a_deleted_engine_is_freed(kind, stage, how, max_norm):
    assert worlds.run(2, left, kind, stage, how, max_norm) == [[], []]


def test_a_parameter_that_outlives_its_engine_says_so():
    for said in worlds.run(2, outlived):
        assert "no longer exists" in said
