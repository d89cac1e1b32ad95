"""Jobs whose layers are frozen, unfrozen, added between steps, or run again in backward."""

import functools
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ds_ext
from tests.common.plain import mean_step
from tests.common.ranks import message, whole

STEPS = 7


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.third = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h).square().mean()


def make() -> Tower:
    torch.manual_seed(11)
    model = Tower()
    model.second.requires_grad_(False)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 6, generator=generator))


def groups(model: Tower) -> list[dict[str, Any]]:
    """Of what is trained from the beginning, with settings of their own."""
    first = {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.1}
    return [first, {"params": list(model.third.parameters()), "clip_threshold": 0.5}]


def before_step(model: Tower, optimizer, step: int) -> None:
    """What the script does between steps."""
    if step == 2:  # a layer is unfrozen and given to the optimizer
        model.second.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.03})
    if step == 3:
        model.first.requires_grad_(False)
    if step == 5:
        model.first.requires_grad_(True)


def frozen(stage: int, policy: str, max_norm: float) -> dict[str, Any]:
    """Freezes and unfreezes layers and adds a group between the steps."""
    model = make()
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "ds_ext": {"gradient_policy": policy},
    }
    optimizer = ds_ext.AdaLomo(groups(model), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    before = whole(model)
    for step in range(STEPS):
        before_step(model, engine.optimizer, step)
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return {"before": before, "after": whole(model)}


def frozen_reference(world: int, max_norm: float, optimizer_type) -> Tower:
    model = make()
    optimizer = optimizer_type(groups(model), lr=0.01, relative_step=False)
    for step in range(STEPS):
        before_step(model, optimizer, step)
        mean_step(optimizer, [loss_of(model, step, rank) for rank in range(world)], max_norm)
    return model


def stranger() -> str:
    """The error of a group whose parameter the engine does not know."""
    model = make()
    optimizer = ds_ext.AdaLomo(groups(model), lr=0.01)
    made = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    group = {"params": [nn.Parameter(torch.ones(2))]}
    return message(lambda: engine.optimizer.add_param_group(group), ValueError)


class Checkpointed(Tower):
    """Its middle is run again: by DeepSpeed's own checkpointing, or selectively by torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle, h = nn.Sequential(self.second, nn.Tanh(), self.second), torch.tanh(self.first(x))
        if self.kind == "selective":
            saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
            contexts = functools.partial(create_selective_checkpoint_contexts, saved)
            h = checkpoint(middle, h, use_reentrant=False, context_fn=contexts)
        else:
            h = deepspeed.checkpointing.checkpoint(middle, h)
        return self.third(h).square().mean()


def checkpointed(stage: int, policy: str, max_norm: float, kind: str) -> dict[str, Any]:
    torch.manual_seed(11)
    model = Checkpointed(kind)
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "ds_ext": {"gradient_policy": policy},
    }
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    before = whole(model)

    for step in range(STEPS):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return {"before": before, "after": whole(model)}


def checkpointed_reference(world: int, max_norm: float) -> Tower:
    torch.manual_seed(11)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        losses = []
        for rank in range(world):
            generator = torch.Generator().manual_seed(10 * step + rank)
            h = torch.tanh(model.first(torch.randn(4, 6, generator=generator)))
            h = model.second(torch.tanh(model.second(h)))
            losses.append(model.third(h).square().mean())
        mean_step(optimizer, losses, max_norm)
    return model
