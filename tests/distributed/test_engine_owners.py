"""Engines on a model that another one steps, copies of models, and engines that are freed."""

import copy
import functools
import gc
import itertools
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
from tests.common import engines, int8_model, models
from tests.common.choose import params
from tests.common.ranks import logged, message, whole
from tests.common.states import from_file, same
from tests.common.updates import check_each
from tests.distributed import expert_parallel_jobs
from tests.distributed.test_int8_engines import engine_of

STEPS = 3
Weights = dict[str, Tensor]
make = functools.partial(models.layers, 6, 9, 4, seed=1)


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 3, 6)).square().mean()


def start(model: nn.Module, stage: int, kept: int, ours: bool = True, **more: Any):
    """An engine; at stage 3 it keeps parameters of up to ``kept`` elements gathered."""
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = ds_ext.LOMO if ours else torch.optim.AdamW
    zero = {"stage3_param_persistence_threshold": kept}
    return engines.start(model, kind(trained, lr=0.1 if ours else 0.01), stage, zero=zero, **more)


def steps(engine, numbers: range) -> dict[str, torch.Tensor]:
    engines.train(engine, loss_of, numbers)
    return whole(engine.module)


def check(before: Weights, after: Weights, ours: bool) -> None:
    model = make()
    model.load_state_dict(before)
    kind = torch.optim.SGD if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1 if ours else 0.01)
    alone = engines.alone(model, optimizer, loss_of, STEPS, dist.get_world_size())
    check_each(after, alone.after, before)


def second_engine(stage: int, ours: bool, begun: bool) -> None:
    """An engine, of ours or with AdamW, takes the model of one of ours over, which ends."""
    model = make()
    with logged() as told:
        older = start(model, stage, 10)
        if begun:
            steps(older, range(1))
        before = whole(model)
        newer = start(model, stage, 40, ours)
    assert sum("takes over" in line for line in told) == (dist.get_rank() == 0)
    after = steps(newer, range(STEPS))
    check(before, after, ours)
    refused = message(functools.partial(steps, older, range(1)), RuntimeError)
    assert "steps this model now" in refused and same(whole(model), after)
    gone = weakref.ref(older)
    del older
    gc.collect()
    assert gone() is None


def unfinished(stage: int) -> None:
    """No second engine while the first waits for a further micro-batch; one after its end."""
    model = make()
    older = start(model, stage, 10, gradient_accumulation_steps=2)
    older.backward(loss_of(older, 0, dist.get_rank()))
    older.step()
    before = whole(model)
    refused = message(lambda: start(model, stage, 10), RuntimeError)
    assert "micro-batches" in refused and "engine.destroy()" in refused
    older.backward(loss_of(older, 1, dist.get_rank()))
    older.step()
    middle = whole(model)
    assert not same(before, middle)
    assert not same(middle, steps(start(model, stage, 10), range(1)))


def after_another(how: str, first: int, stage: int) -> None:
    """An engine of ours on the model of another one, whose stage is ``first``.

    "scored": that has no optimizer, and has scored the model in inference mode. "ours": it has
    stepped the model. "AdamW": it is torch's, and ends after ours was refused.
    """
    model = make()
    if how == "scored":
        other = deepspeed.initialize(model=model, config=engines.config(first))[0]
        with torch.inference_mode():
            loss_of(other, 0, dist.get_rank())
        other.destroy()
    else:
        other = start(model, first, 10, ours=how == "ours")
        steps(other, range(1))
    before = whole(model)
    if how == "AdamW":  # whose hooks are there
        with pytest.raises(ValueError, match=r"call destroy\(\)"):
            start(model, stage, 10)
        with pytest.raises(ValueError, match=r"destroy\(\)|ZeRO-3 has partitioned"):
            ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))
        assert same(before, whole(model))
        other.destroy()
    if stage < first == 3:
        with pytest.raises(ValueError, match=f"zero_optimization.stage = {stage}.*set stage 3"):
            start(model, stage, 10)
    else:
        made = start(model, stage, 0 if how == "scored" else 40)
        check(before, steps(made, range(STEPS)), ours=True)


def fused_beside_another() -> None:
    """An engine at stage 0 has no hooks that tell of it: its backward pass is refused."""
    model = make()
    other, before = start(model, 0, 10, ours=False), whole(model)
    fused = ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="fuse_into_backward steps parameters of this model"):
        other.backward(loss_of(other, 0, dist.get_rank()))
    assert same(before, whole(model))
    fused.remove()
    check(before, steps(other, range(STEPS)), ours=False)


def copied(stage: int) -> None:
    """A copy of the engine's module, made between steps, is an ordinary model."""
    engine = start(make(), stage, 0)
    steps(engine, range(1))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
    before = whole(engine.module)
    assert same(dict(twin.named_parameters()), before)
    if stage < 3:  # DeepSpeed's own hooks gather what a copy does not have, with AdamW as well
        saved = from_file(engine.module, weights_only=False)  # cannot be done with AdamW
        assert same(before, dict(saved.named_parameters()))
        called = engine._forward_prologue
        engine._forward_prologue = None  # a copy does not call it
        calls = engine.optimizer.fused.buckets.uses.count.copy()
        loss_of(twin, 1, dist.get_rank()).backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert engine.optimizer.fused.buckets.uses.count == calls
        engine._forward_prologue = called
        assert same(before, whole(engine.module))
    assert not same(before, steps(engine, range(1, 2)))


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
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def _engine(kind: str, stage: int, max_norm: float) -> Any:
    if kind == "int8":
        model = int8_model.made(seed=1)
        return engine_of(stage, model, gradient_clipping=max_norm)
    if kind == "experts" and "ep_size_2" not in groups._get_expert_parallel_group_dict():
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


USES = {"nothing": 0, "step": 1, "steps": 3, "destroyed": 3, "failure": 0}  # steps of each


def _use(engine: Any, kind: str, how: str) -> None:
    for _ in range(USES[how]):
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
    adapter = engine.optimizer
    parts = {"engine": engine, "model": engine.module, "adapter": adapter}
    parts |= {"fused": adapter.fused, "optimizer": adapter.optimizer, "layout": adapter.layout}
    parts |= dict(engine.module.named_parameters())
    states = [x for kept in adapter.state.values() for x in kept.values() if torch.is_tensor(x)]
    parts |= {f"state {i}": x for i, x in enumerate(states)}
    return {name: weakref.ref(part) for name, part in parts.items()}


QUICK = [(second_engine, case) for case in ((1, False, True), (3, True, False))]
QUICK += [(unfinished, (3,)), (copied, (1,)), (copied, (3,)), (fused_beside_another, ())]
OTHERS = [("scored", 3, 3), ("ours", 1, 3), ("ours", 2, 0)]
OTHERS += [("AdamW", stage, stage) for stage in (1, 2, 3)]
OTHERS += [("ours", 3, stage) for stage in (0, 1, 2)]  # partitions are refused
QUICK += [(after_another, case) for case in OTHERS[::2]]
ALL = [(second_engine, case) for case in itertools.product(range(4), (True, False), (True, False))]
ALL += [(job, (stage,)) for job in (unfinished, copied) for stage in range(4)]
ALL += [(after_another, case) for case in OTHERS] + [(fused_beside_another, ())]


@pytest.mark.parametrize("job, case", params(ALL, QUICK))
def test_a_model_that_another_engine_has_had(job, case):
    worlds.run(2, job, *case)


# At stage 3, DeepSpeed's nodes in a graph that a module keeps hold the module.
CASES = [("dense", 3), *((kind, stage) for kind in ("keeps", "experts") for stage in range(3))]
CASES += [("int8", 1), ("int8", 3)]


@pytest.mark.parametrize("kind, stage", params(CASES, [("dense", 3), ("keeps", 1), ("experts", 0)]))
@worlds.on(2)
def test_a_deleted_engine_is_freed(kind, stage):
    for i, how in enumerate(USES):
        max_norm = 0.1 * ((i + stage + stage // 2) % 2)  # each use with and without, by stages
        engine = _engine(kind, stage, max_norm)
        _use(engine, kind, how)
        found = _objects(engine)
        has_stepped = how not in ("nothing", "failure")
        assert ("state 0" in found) == (has_stepped and kind != "int8")  # LOMO has no state
        if how == "destroyed":
            engine.destroy()
        del engine
        # After a failure, autograd keeps nodes that it has not run until this thread's next pass.
        torch.ones(1, requires_grad=True).square().backward()
        gc.collect()
        assert not [name for name, part in found.items() if part() is not None], (how, max_norm)


@worlds.on(2)
def test_a_parameter_that_outlives_its_engine_says_so():
    engine = _engine("dense", 1, 0.0)
    param = engine.module.up.weight
    del engine
    gc.collect()
    assert "no longer exists" in message(lambda: deepspeed.utils.safe_get_full_fp32_param(param))
