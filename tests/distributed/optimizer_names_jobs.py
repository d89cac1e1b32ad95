"""Which optimizer a name in the JSON config takes: a job on real ranks."""

from typing import Any

import deepspeed
import torch
from torch import nn

from tests.common.ranks import logged, message, whole

LR = 0.01
DECAY = 0.1


def start() -> nn.Module:
    """The model that the job trains: weights and biases decay differently."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(4, 6, generator=generator)).square().sum()


ADAMW = {"lr": LR, "weight_decay": DECAY, "betas": [0.9, 0.99]}


def taken(name: str, stage: int, params: dict[str, Any]) -> dict[str, Any]:
    """Trains by the optimizer that ``name`` takes -> its class, weights, what was logged."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": params},
    }
    with logged() as said:
        engine, *_ = deepspeed.initialize(model=start(), config=config)
    for step in range(4):
        engine.backward(loss_of(engine, step))
        engine.step()
    inner = engine.optimizer.optimizer
    made = {
        "class": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "said": [line for line in said if " is ds_ext's" in line or " is DeepSpeed's" in line],
        "weights": whole(engine.module),
    }
    engine.destroy()
    return made


def refused(name: str) -> str:
    """The message of the error that a name causes, or ""."""
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": name}}
    return message(lambda: deepspeed.initialize(model=start(), config=config), ValueError)
