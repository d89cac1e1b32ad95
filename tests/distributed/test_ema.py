"""Moving averages of weights on real ranks: torch's, at each stage; exchange, resume, overflow."""

import functools
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ds_ext
from tests import worlds
from tests.common import engines, models, plain
from tests.common.choose import params
from tests.common.ranks import identical, shared_folder, whole
from tests.common.states import same
from tests.common.updates import error
from tests.distributed import experts_jobs, mixtures, pipelines_jobs, test_tensor_parallel

DECAY, STEPS = 0.9, 5
# Small updates would be close to the resolution of fp32.
LR = {"AdamW": 1e-2, "AdaLomo": 5e-2, "Muon": 5e-2}
# Sizes that two and three ranks do not divide evenly.
make = functools.partial(models.layers, 6, 13, 5)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def batch(step: int) -> Tensor:
    return engines.rows(step, dist.get_rank(), 4, 6)


def engine_of(stage: int, rule: str, **more: Any) -> deepspeed.DeepSpeedEngine:
    params = {"lr": LR[rule], "ema_decay": DECAY} | more.pop("params", {})
    optimizer = {"type": f"ds_ext.{rule}", "params": params}
    return engines.start(make(), None, stage, optimizer=optimizer, **more)


def train(way: int | str | None, rule: str) -> dict[str, Any]:
    """The weights of each step and inside ``ema()``, and losses before, inside and after that.

    At a stage, or without an engine: there the ranks have copies, or parts of ``fully_shard``.
    """
    if isinstance(way, int):
        engine = engine_of(way, rule)
    else:
        model = make()
        if way == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)  # keeps its last layer gathered after a forward pass
        optimizer = getattr(ds_ext, rule)(model.parameters(), lr=1e-2, ema_decay=DECAY)
        engine = engines.start(model, optimizer, None)
    model, steps = engine.module, []
    start = whole(model)
    for step in range(STEPS):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
        steps.append(whole(model))
    stepper = engine.optimizer if isinstance(way, int) else engine.fused
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))

    def loss() -> float:
        """Of a batch of rank 0. Weights of small units stay gathered in and after it."""
        with torch.no_grad():
            return float(loss_of(engine, x))

    losses = [loss()]
    with stepper.ema():
        losses.append(loss())
        inside = whole(model)
    losses.append(loss())
    assert same(steps[-1], whole(model)) and identical(inside)
    if isinstance(way, int):
        refuse_inside(engine)
    return {"inside": inside, "losses": losses, "start": start, "steps": steps}


def refuse_inside(engine: deepspeed.DeepSpeedEngine) -> None:
    before, param = whole(engine.module), next(engine.module.parameters())
    with engine.optimizer.ema(), shared_folder() as folder:
        for call in (
            lambda: engine.backward(loss_of(engine, batch(0))),
            engine.step,
            lambda: engine.save_checkpoint(folder),
            lambda: engine.load_checkpoint(folder),
            engine.optimizer.ema,
            lambda: safe_get_full_fp32_param(param),
            lambda: safe_get_full_optimizer_state(param, "ema"),
        ):
            with pytest.raises(RuntimeError, match=r"inside ema\(\)"):
                call()
    assert same(before, whole(engine.module))


def divided(kind: str) -> dict[str, Any]:
    """Training of a model whose ranks have different weights: what this rank has of them."""
    params = {"lr": 1e-2, "ema_decay": DECAY}
    if kind == "pipeline":
        engine = pipelines_jobs.start(pipelines_jobs.Run("adamw", params | {"lr": 0.1}, zero=1))
    elif kind == "tensor":
        optimizer = {"type": "ds_ext.adamw", "params": params}
        case = test_tensor_parallel.Case("llama", "adamw", 1, {"optimizer": optimizer})
        engine = test_tensor_parallel.start(case)
    else:
        run = mixtures.Run("mixtral", "adamw", 2, ep=2, json=True, own=params)
        engine = experts_jobs.start(run, run.stage, run.ep)
    start, steps = plain.weights(engine.module), []
    for step in range(STEPS):
        if kind == "pipeline":
            engine.train_batch(pipelines_jobs.batches(engine, step))
        elif kind == "tensor":
            test_tensor_parallel.train(engine, case, [step])
        else:
            engine.backward(experts_jobs.loss_of(engine, step, dist.get_rank()))
            engine.step()
        steps.append(plain.weights(engine.module))
    with engine.optimizer.ema():
        inside = plain.weights(engine.module)
    assert same(steps[-1], plain.weights(engine.module))
    return {"start": start, "steps": steps, "inside": inside}


# Ranks, how a model is trained, and an optimizer whose statistics may be of whole matrices.
WAYS = [(0, "AdamW"), (1, "AdaLomo"), (2, "AdamW"), (3, "AdamW"), (3, "AdaLomo")]
WAYS += [(2, "Muon"), (3, "Muon"), (None, "AdamW"), ("fsdp2", "AdamW")]
EMA = "moving averages of the weights (`ema_decay`)"
ALL = [(ranks, *way) for ranks in (2, 3) for way in WAYS]
QUICK = [(2, way, rule) for way, rule in WAYS if rule == "AdamW"]


def torchs(start, steps):
    """torch's averages of the weights that training had after each step."""
    model = nn.ParameterDict({n.replace(".", "/"): p.double() for n, p in start.items()})
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for weights in steps:
        with torch.no_grad():
            for name, p in weights.items():
                model[name.replace(".", "/")].copy_(p)
        averaged.update_parameters(model)
    return {n.replace("/", "."): p.detach() for n, p in averaged.module.items()}


def loss_by(weights):
    model = make()
    model.load_state_dict({n: p.float() for n, p in weights.items()})
    return loss_of(model, torch.randn(8, 6, generator=torch.Generator().manual_seed(9))).item()


@pytest.mark.supports(EMA, stage="way", optimizer="rule")
@pytest.mark.parametrize("ranks, way, rule", params(ALL, QUICK))
def test_the_average_is_torchs_and_the_model_has_it_inside(ranks, way, rule):
    for got in worlds.once(ranks, train, way, rule):
        wanted = torchs(got["start"], got["steps"])
        assert error(got["inside"], wanted, got["start"]) <= 1e-6
        losses = [loss_by(w) for w in (got["steps"][-1], wanted, got["steps"][-1])]
        assert got["losses"] == pytest.approx(losses, rel=1e-5)
        assert got["losses"][1] != pytest.approx(losses[0], rel=1e-3)


@pytest.mark.supports(EMA, stage="stage", optimizer="AdamW")
@pytest.mark.parametrize("stage", params([0, 1, 2, 3], [1, 3]))
@worlds.on(2)
def test_bf16_weights_are_exchanged_with_fp32_averages(stage):
    engine = engine_of(stage, "AdamW", bf16={"enabled": True})
    engines.train(engine, lambda model, step, _: loss_of(model, batch(step).bfloat16()), STEPS)

    def averages() -> dict[str, Tensor]:
        named = engine.module.named_parameters()
        return {n: safe_get_full_optimizer_state(p, "ema").clone() for n, p in named}

    before, weights = averages(), whole(engine.module)
    with engine.optimizer.ema():
        inside = whole(engine.module)
    assert same(inside, {n: average.bfloat16() for n, average in before.items()})
    assert same(weights, whole(engine.module)) and same(before, averages())
    for n, average in before.items():
        assert average.dtype == torch.float32 and not torch.equal(weights[n], inside[n])


DIVIDED = [(2, "experts"), (2, "pipeline"), (2, "tensor"), (4, "pipeline"), (4, "tensor")]


@pytest.mark.parametrize("ranks, kind", params(DIVIDED, DIVIDED[1:2]))
def test_ranks_with_different_weights_average_their_own(ranks, kind):
    for got in worlds.once(ranks, divided, kind):
        wanted = torchs(got["start"], got["steps"])
        assert error(got["inside"], wanted, got["start"]) <= 1e-6
