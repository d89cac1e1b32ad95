"""Jobs whose layers are frozen, unfrozen, added between steps, or run again in backward."""

import functools
from typing import Any

import deepspeed
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ds_ext
from tests.common import engines

STEPS = 7


class Tower(nn.Module):
    """Three layers; the middle one is used twice in a segment that is run again, if any is."""

    def __init__(self, checkpointing: str = "") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.third = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.checkpointing == "":
            return self.third(torch.tanh(self.second(h))).square().mean()
        middle = nn.Sequential(self.second, nn.Tanh(), self.second)
        if self.checkpointing == "deepspeed":
            h = deepspeed.checkpointing.checkpoint(middle, h)
        elif self.checkpointing == "selective":
            saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
            contexts = functools.partial(create_selective_checkpoint_contexts, saved)
            h = checkpoint(middle, h, use_reentrant=False, context_fn=contexts)
        else:  # the reference
            h = middle(h)
        return self.third(h).square().mean()


def make(checkpointing: str = "") -> Tower:
    torch.manual_seed(11)
    model = Tower(checkpointing)
    model.second.requires_grad_(checkpointing != "")
    return model


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(engines.rows(number, rank, 4, 6))


def groups(model: Tower) -> list[dict[str, Any]]:
    """Of what is trained from the beginning, with settings of their own."""
    first = {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.1}
    return [first, {"params": list(model.third.parameters()), "clip_threshold": 0.5}]


def edit(model: Tower, optimizer: Any, step: int) -> None:
    """What the script does between steps."""
    if step == 2:  # a layer is unfrozen and given to the optimizer
        model.second.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.03})
    if step in (3, 5):
        model.first.requires_grad_(step == 5)


def frozen(stage: int, policy: str, max_norm: float) -> dict[str, Any]:
    """Freezes and unfreezes layers and adds a group between the steps."""
    model = make()
    optimizer = ds_ext.AdaLomo(groups(model), lr=0.01)
    engine = engines.start(model, optimizer, stage, policy, gradient_clipping=max_norm)
    return engines.trained(engine, loss_of, STEPS, edit=edit)


def frozen_alone(world: int, max_norm: float) -> engines.Alone:
    model = make()
    optimizer = transformers.Adafactor(groups(model), lr=0.01, relative_step=False)
    return engines.alone(model, optimizer, loss_of, STEPS, world, max_norm, edit=edit)


def checkpointed(stage: int, policy: str, max_norm: float, kind: str) -> dict[str, Any]:
    """The middle is run again: by DeepSpeed's own checkpointing, or selectively by torch's."""
    model = make(kind)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    engine = engines.start(model, optimizer, stage, policy, gradient_clipping=max_norm)
    return engines.trained(engine, loss_of, STEPS)


def checkpointed_alone(world: int, max_norm: float) -> engines.Alone:
    model = make("none")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return engines.alone(model, sgd, loss_of, STEPS, world, max_norm)
