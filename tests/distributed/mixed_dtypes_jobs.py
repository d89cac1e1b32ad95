"""Engines over fp64 models and models of several dtypes: jobs."""

from typing import Any

import torch

from tests.common import engines
from tests.unit.test_dtypes_mixed import make, optimizer_of

STEPS = 3


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 5, 6).double())


def train(
    name: str, stage: int, dtypes: list[torch.dtype], policy: str, more: dict[str, Any]
) -> dict[str, Any]:
    model = make(dtypes)
    optimizer = optimizer_of(name, model.parameters())
    return engines.trained(engines.start(model, optimizer, stage, policy, **more), loss_of, STEPS)
