"""Jobs that save models compiled in one way and load them into models compiled in another."""

from typing import Any

import deepspeed
import torch
from torch import nn

import ds_ext


class Tower(nn.Module):
    """Two layers, one of them frozen, and a buffer that counts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.block(torch.tanh(self.first(x)))).square().mean()


def compiled(way: str, seed: int) -> nn.Module:
    """A model whose parameters' names contain _orig_mod in three of four ways."""
    model: Any = Tower(seed)
    if way == "submodules":
        model.block = torch.compile(model.block, backend="eager")
        model.frozen = torch.compile(model.frozen, backend="eager")
    elif way in ("model", "both"):
        if way == "both":
            model.block[0] = torch.compile(model.block[0], backend="eager")
        model = torch.compile(model, backend="eager")
    return model


def start(way: str, stage: int, seed: int) -> deepspeed.DeepSpeedEngine:
    model = compiled(way, seed)
    optimizer = ds_ext.CAME([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if way == "engine":
        engine.compile(backend="eager")
    return engine


def step(engine: deepspeed.DeepSpeedEngine, number: int) -> None:
    generator = torch.Generator().manual_seed(number)  # of rank 0 alone are buffers saved
    engine.backward(engine(torch.randn(4, 5, generator=generator)))
    engine.step()


def values(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """All parameters and buffers, in the model's order."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = (*engine.module.parameters(), *engine.module.buffers())
        return [value.detach().clone() for value in found]


def carried_over(ways: tuple[str, str], stage: int, folder: str) -> tuple[bool, bool]:
    """Whether a model saved in one way is the same loaded in another, and after a further step."""
    first, second = (start(way, stage, seed) for seed, way in enumerate(ways))
    step(first, 0)
    first.save_checkpoint(folder)
    second.load_checkpoint(folder)
    alike = []
    for _ in range(2):
        pairs = zip(values(first), values(second), strict=True)
        alike.append(all(torch.equal(a, b) for a, b in pairs))
        for engine in (first, second):
            step(engine, 1)
    return alike[0], alike[1]


def adamw_carried_over(ways: tuple[str, str], stage: int, folder: str) -> bool:
    """The same for weights that DeepSpeed's AdamW has trained."""
    model = compiled(ways[0], 0)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    first = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    step(first, 0)
    first.save_checkpoint(folder)
    second = start(ways[1], stage, 1)
    second.load_checkpoint(folder)
    return all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))
