"""Training by rules that are for the matrices of linear layers, others by AdamW: jobs."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules.base import key_of
from tests.common import by_role, models
from tests.common.ranks import identical, logged, whole
from tests.distributed import resume_jobs, zero_jobs

STEPS = 4
# By what a config says; a projection is renewed in step 4.
TYPES: dict[str, dict[str, Any]] = {
    "APOLLO": {"lr": 0.02, "rank": 3, "update_proj_gap": 3, "weight_decay": 0.1},
    "APOLLO-Mini": {"lr": 0.005, "update_proj_gap": 3, "weight_decay": 0.1},
    "ds_ext.Muon": {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"},
}


# How a model is made and used.
HOW: dict[str, dict[str, Any]] = {
    "as it is": {},
    "zero.Init": {"zero_init": True},
    "reentrant": {"checkpointing": "reentrant"},
    "nonreentrant": {"checkpointing": "nonreentrant"},
}


def start(name: str, stage: int, model: torch.nn.Module, **more: Any) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": name, "params": TYPES[name] | more},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 300,
            "stage3_param_persistence_threshold": 30,
        },
    }
    return deepspeed.initialize(model=model, config=config)[0]


def accumulate(name: str, stage: int, weight_update: str | None) -> dict[str, Any]:
    """Weights before and after steps of two micro-batches each, clipped by their norm.

    In bf16, or in fp32 if ``weight_update`` is None.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": weight_update is not None},
        "optimizer": {
            "type": name,
            "params": TYPES[name] | {"weight_update": weight_update or "nearest"},
        },
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300},
    }
    engine = deepspeed.initialize(model=models.make(), config=config)[0]
    before = whole(engine.module)
    for step in range(STEPS):
        engine.backward(engine(models.batch(step, world)[rank], step=step))
        engine.step()
    after = whole(engine.module)
    return {"before": before, "after": after, "identical": identical(after)}


def train(name: str, stage: int | None, how: str = "as it is") -> dict[str, Any]:
    """The weights before and after, and how each parameter was stepped; without an engine: None."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = zero_jobs.build(zero_jobs.Case("lomo", {}, **HOW[how]))
    with logged() as said:
        if stage is None:
            optimizer = OPTIMIZERS[key_of(name)].for_model(model, **TYPES[name])
            ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
        else:
            engine = start(name, stage, model)
            optimizer = engine.optimizer
    before = whole(model)
    for step in range(STEPS):
        batch = models.batch(step, world)[rank]
        if stage is None:
            model(batch, step=step).backward()
            optimizer.step()
        else:
            engine.backward(engine(batch, step=step))
            engine.step()
    after = whole(model)
    return {
        "before": before,
        "after": after,
        "identical": identical(after),
        "said": said,
        **by_role.told(optimizer, model),
    }


def resume(name: str, stage: int, folder: str, first: int, last: int) -> dict[str, Any]:
    """Steps ``first`` to ``last``, from a checkpoint if there is one; then saves another."""
    model = resume_jobs.model_of("apollo")
    engine = start(name, stage, model, seed=5)
    before = whole(engine.module)
    if first:
        engine.load_checkpoint(folder, tag=str(first))
    for step in range(first, last):
        engine.backward(engine(resume_jobs.batch(step), step=step))
        engine.step()
    engine.save_checkpoint(folder, tag=str(last))
    return {"before": before, "after": whole(engine.module)}
