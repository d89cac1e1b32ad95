"""The metrics of each step, and what the step did: jobs."""

import csv
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests.common.ranks import shared_folder, whole
from tests.distributed.freezing_jobs import loss_of, make


def start(model: nn.Module, stage: int, extra: dict[str, Any]):
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **extra,
    }
    model.requires_grad_(True)
    optimizer = ds_ext.AdaLomo(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1]},
        ],
        lr=0.01,
    )
    return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]


def metrics(stage: int) -> dict[str, Any]:
    """The metrics of each step, what they ought to be, and what DeepSpeed's CSV monitor wrote."""
    with shared_folder() as folder:
        return _metrics(stage, folder)


def _metrics(stage: int, folder: str) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
    extra = {"csv_monitor": monitor, "gradient_clipping": 0.2}
    engine = start(make(), stage, extra)
    told, expected = [], []
    for step in range(3):
        before = whole(engine.module)
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
        after = whole(engine.module)
        told.append(engine.optimizer.metrics())
        expected.append([_rms(before, after, ndim) for ndim in (2, 1)])
    events = {}
    if dist.get_rank() == 0:
        for path in Path(folder, f"stage{stage}").glob("*.csv"):
            with path.open() as file:
                events[path.stem] = [row for row in csv.reader(file)][1:]
    return {"told": told, "expected": expected, "events": events}


def _rms(before, after, ndim: int) -> tuple[float, float]:
    chosen = [n for n in after if after[n].ndim == ndim]
    moved = torch.cat([(after[n] - before[n]).flatten() for n in chosen])
    weight = torch.cat([after[n].flatten() for n in chosen])
    return tuple(float(x.double().square().mean().sqrt()) for x in (moved, weight))
