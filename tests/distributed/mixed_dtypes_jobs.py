"""Engines over fp64 models, models of several dtypes, and bf16 weights of linear layers: jobs."""

from typing import Any

import torch
import torch.distributed as dist

from tests.common import engines, models
from tests.common.ranks import identical
from tests.distributed import zero_jobs
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


def accumulate(rule: str, stage: int, weight_update: str | None) -> dict[str, Any]:
    """Steps of two micro-batches each, clipped by their norm, by a rule of linear layers.

    In bf16, or in fp32 if ``weight_update`` is None.
    """
    world, hypers = dist.get_world_size(), zero_jobs.HYPERS[rule] | {"weight_decay": 0.1}
    hypers |= {"weight_update": weight_update or "nearest"}
    engine = engines.start(
        models.make(),
        None,
        stage,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        bf16={"enabled": weight_update is not None},
        optimizer={"type": f"ds_ext.{rule}", "params": hypers},
        zero={"reduce_bucket_size": 300},
    )

    def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
        return model(models.batch(number, world)[rank], step=number)

    found = engines.trained(engine, loss_of, 2, accumulation=2)
    return found | {"identical": identical(found["after"])}
