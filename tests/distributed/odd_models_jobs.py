"""Engines on models of unusual memory and gradients, on real ranks."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

import ds_ext
from tests.common.plain import mean_step
from tests.common.ranks import logged, message
from tests.distributed.training_jobs import whole

STEPS = 4


class Odd(nn.Module):
    """Sparse embeddings and convolutions, a part of which is frozen at the beginning."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(9, 12, sparse=sparse)
        self.conv = nn.Conv2d(3, 5, 2)
        self.late = nn.Linear(5, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.words(x).view(-1, 3, 2, 2)
        return self.late(torch.tanh(self.conv(images)).flatten(1)).square().mean()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randint(0, 9, (6,), generator=generator))


def train(stage: int, extra: dict[str, Any]) -> dict[str, Any]:
    """An engine's steps; gradients were left by an earlier pass, and layers are unfrozen later."""
    model, rank = Odd(sparse=True), dist.get_rank()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_of(model, 99, rank).backward()
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **extra,
    }
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    model.to(memory_format=torch.channels_last)
    for step in range(STEPS):
        if step == 2:
            model.late.requires_grad_(True)
        engine.backward(loss_of(engine, step, rank))
        engine.step()
    return {"before": before, "after": whole(model)}


def reference(world: int, max_norm: float) -> dict[str, torch.Tensor]:
    model = Odd(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for step in range(STEPS):
        if step == 2:
            model.late.requires_grad_(True)
        mean_step(optimizer, [loss_of(model, step, rank) for rank in range(world)], max_norm)
    return dict(model.named_parameters())


# By ZeRO stage, what changes no result and is said to have no effect.
UNREAD: dict[int, dict[str, Any]] = {
    1: {"reduce_scatter": False, "ignore_unused_parameters": False},
    2: {"reduce_scatter": False, "offload_param": {"device": "cpu", "pin_memory": False}},
    3: {"reduce_scatter": False, "offload_param": {"device": "cpu", "buffer_count": 4}},
}


def without_effect(stage: int) -> tuple[bool, list[str]]:
    """Whether settings change no bit of the weights, and what the log says of them."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10}
    plain = train(stage, {})["after"]
    with logged() as said:
        told = train(stage, {"zero_optimization": zero | UNREAD[stage]})["after"]
    is_same = all(torch.equal(told[name], value) for name, value in plain.items())
    return is_same, [line for line in said if "no effect" in line]


class First(nn.Module):
    """Layers that are taken together, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(x))


def leaf_inputs() -> tuple[str, bool, bool]:
    """What is said of a leaf module's input without gradients; if weights moved then, and later."""
    model = nn.Sequential(First(), nn.Linear(8, 1))
    set_z3_leaf_modules(model, [First])
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    before = whole(model)

    def step(needs_gradient: bool) -> None:
        engine.backward(engine(torch.randn(6, 6, requires_grad=needs_gradient)).square().mean())
        engine.step()

    told = message(lambda: step(False), RuntimeError)
    with torch.no_grad():
        engine(torch.randn(6, 6))
    stayed = all(torch.equal(p, before[n]) for n, p in whole(model).items())
    step(True)
    after = whole(model)
    return told, stayed, not torch.equal(after["0.used.weight"], before["0.used.weight"])


def wrapped() -> str:
    """What an engine says to a model in DDP."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1}
    return message(
        lambda: deepspeed.initialize(model=model, optimizer=optimizer, config=config), ValueError
    )
