"""Training by gradients whose sums over the ranks are exact: jobs of test_exact_sums.py."""

from typing import Any

import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.checkpoint import resharding
from ds_ext.engine.checkpoint_contents import owned
from tests.common import engines, table

STEPS = 6
# What moments of 8 bits round in groups of 32, which are cut in the first, the third and the last.
SHAPES = ((70, 33), (64, 32), (1500,), (7, 31, 9), (33,))
RULES: dict[str, dict[str, Any]] = {
    "FlashAdamW": {"lr": 0.02, "weight_decay": 0.1},
    "Lion": {"lr": 0.02, "weight_decay": 0.1, "nbits": 8},
}


class Given(nn.Module):
    """Parameters whose gradients are what its loss is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(table.weights(SHAPES, torch.float32))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.weights, gradients, strict=True))


def gradients(step: int, rank: int) -> list[Tensor]:
    """A rank's, multiples of 6 of which fp32 holds the mean of 2 or 3 ranks in any order."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    numbers = (torch.randint(-(2**18), 2**18, shape, generator=generator) for shape in SHAPES)
    return [n * 6 * 2.0**-21 for n in numbers]


def train(name: str, stage: int) -> dict[str, Any]:
    """The weights after the steps, and this rank's pieces of the state."""
    optimizer = {"type": f"ds_ext.{name}", "params": RULES[name]}
    zero = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 40}
    engine = engines.start(Given(), None, stage, optimizer=optimizer, zero=zero)
    found = engines.trained(engine, lambda model, *of: model(gradients(*of)), STEPS)
    kept = resharding.save_state(engine.optimizer.optimizer, owned(engine.optimizer.layout))
    return {"after": found["after"], "state": kept}


class Linear(nn.Module):
    """A model whose gradient is the same small whole numbers on every rank: sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 29))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, step: int) -> torch.Tensor:
        g = torch.arange(13 * 29).view(13, 29) * (step + 3) % 7 - 3
        h = torch.arange(7) + step
        return (self.weight * g).sum() + (self.bias * h).sum()


def bits(stage: int, weight_update: str) -> dict[str, torch.Tensor]:
    """bf16 weights after steps whose gradients do not depend on the number of ranks."""
    torch.manual_seed(4)
    model = Linear()
    lomo = {"type": "LOMO", "params": {"lr": 1e-3, "weight_update": weight_update, "seed": 5}}
    engine = engines.start(model, None, stage, optimizer=lomo, bf16={"enabled": True})
    return engines.trained(engine, lambda model, step, rank: model(step), 10)["after"]


def bits_reference(weight_update: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    model = Linear().bfloat16()
    params = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = ds_ext.LOMO(params, lr=1e-3, weight_update=weight_update, seed=5)
    for step in range(10):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}
