"""Jobs that step one model by several rules, chosen by name in the JSON config."""

import functools
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests.common import engines, models
from tests.common.ranks import identical, logged, message, whole

STEPS = 4
ENTRIES: list[dict[str, Any]] = [
    {"match": "embed|up.weight", "type": "GaLoreAdamW", "rank": None, "lr": 3e-3},
    {"match": r"norm|bias$", "type": "lomo", "lr": 0.1},
]
OPTIMIZER = {"type": "AdaLomo", "params": {"lr": 0.02, "param_groups": ENTRIES}}
CLIP = 0.5


def start(stage: int, optimizer: dict[str, Any] = OPTIMIZER) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    how: dict[str, Any] = {"optimizer": optimizer, "zero": {"reduce_bucket_size": 200}}
    return engines.start(models.Zoo(), None, stage, gradient_clipping=CLIP, **how)


def zoo_loss(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
    return model(models.batch(step, world)[rank], step)


def advance(engine: deepspeed.DeepSpeedEngine, steps: range) -> None:
    engines.train(engine, functools.partial(zoo_loss, world=dist.get_world_size()), steps)


def train(stage: int, folder: str) -> dict[str, Any]:
    """The weights before and after, what was said, and those of a run that was broken off."""
    with logged() as said:
        engine = start(stage)
    before = whole(engine.module)
    advance(engine, range(STEPS // 2))
    engine.save_checkpoint(folder)
    advance(engine, range(STEPS // 2, STEPS))
    after = whole(engine.module)
    again = start((stage + 1) % 4)
    again.load_checkpoint(folder)
    advance(again, range(STEPS // 2, STEPS))
    first, second = ENTRIES
    other = {"lr": 0.02, "param_groups": [first, {**second, "type": "LAMB"}]}
    return {
        "before": before,
        "after": after,
        "resumed": whole(again.module),
        "identical": identical(after),
        "said": said,
        "refused": message(
            lambda: start(stage, {"type": "AdaLomo", "params": other}).load_checkpoint(folder),
            ds_ext.CheckpointError,
        ),
    }


def grouped_by_script(stage: int) -> list[float]:
    """The weight decay of groups of a script, of which one says its own and one does not."""
    model = models.Zoo()
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdaLomo", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return [group["weight_decay"] for group in engine.optimizer.param_groups]


LR = 0.01
DECAY = 0.1


def network() -> nn.Module:
    """The model that the job trains: weights and biases decay differently."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 4, 6)).square().sum()


ADAMW = {"lr": LR, "weight_decay": DECAY, "betas": [0.9, 0.99]}


def taken(name: str, stage: int, params: dict[str, Any]) -> dict[str, Any]:
    """Trains by the optimizer that ``name`` takes -> its class, weights, what was logged."""
    named = {"type": name, "params": params}
    with logged() as said:
        engine = engines.start(
            network(), None, stage, optimizer=named, zero_force_ds_cpu_optimizer=False
        )
    weights = engines.trained(engine, loss_of, 4)["after"]
    inner = engine.optimizer.optimizer
    made = {
        "class": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "said": [line for line in said if " is ds_ext's" in line or " is DeepSpeed's" in line],
        "weights": weights,
    }
    engine.destroy()
    return made
