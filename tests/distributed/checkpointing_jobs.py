"""Jobs whose layers are run again in backward."""

import functools
from typing import Any

import deepspeed
import torch
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
    return Tower(checkpointing)


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(engines.rows(number, rank, 4, 6))


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
