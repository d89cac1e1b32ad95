"""Calls of DeepSpeed's public methods of an engine and its optimizer, and metrics: jobs."""

import csv
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_ext
from tests.common import engines
from tests.common.ranks import message, shared_folder, whole
from tests.distributed import param_groups_jobs
from tests.distributed.safe_access_jobs import Pair, loss_of

ABSENT = ("fp32_partitioned_groups_flat", "averaged_gradients", "unscale_and_clip_grads")


def start(stage: int) -> deepspeed.DeepSpeedEngine:
    lomo = {"type": "LOMO", "params": {"lr": 0.1}}
    return engines.start(Pair(), None, stage, train_micro_batch_size_per_gpu=4, optimizer=lomo)


def backward(engine: deepspeed.DeepSpeedEngine, number: int, **more: Any) -> None:
    engine.backward(loss_of(engine, number, dist.get_rank()), **more)


def works(stage: int) -> dict[str, Any]:
    """What calls give that work."""
    engine = start(stage)
    optimizer = engine.optimizer
    for number in (0, 3):  # an even number of steps: DeepSpeed counts on, with more micro-batches
        backward(engine, number)
        engine.allreduce_gradients()  # which have been reduced
        engine.step()
    found = {
        "after": whole(engine.module),
        "applied": engine.was_step_applied(),
        "lr": (engine.get_lr(), optimizer.get_lr(), optimizer.defaults["lr"]),
        "batch": engine.train_batch_size(),
        "offload": hasattr(optimizer, "parameter_offload"),
        "scale": (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow),
        "groups": len(optimizer.fp16_groups) == len(optimizer.param_groups),
    }
    optimizer.set_lr(0.2)
    engine.set_train_batch_size(16)  # two micro-batches
    for number in (1, 2):
        backward(engine, number)
        engine.step()
    found["accumulated"] = whole(engine.module)
    engine.empty_partition_cache()
    found["emptied"] = whole(engine.module)
    with shared_folder() as folder:
        engine.save_16bit_model(folder, exclude_frozen_parameters=False)
    engine.destroy()
    return found


def refused(stage: int) -> dict[str, str]:
    """The errors of calls that are refused, which change no weight."""
    engine = start(stage)
    optimizer, before = engine.optimizer, whole(engine.module)
    stranger = torch.nn.Parameter(torch.ones(2))
    told = {
        "coalesce": message(engine.coalesce_grad_reduction),
        "clip": message(engine.clip_fp32_gradients),
        "clip_grad_norm_": message(
            lambda: torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        ),
        "rate": message(lambda: backward(engine, 0, learning_rate=0.1), TypeError),
        "backward": message(lambda: optimizer.backward(loss_of(engine, 0, 0))),
        "load": message(lambda: optimizer.load_state_dict({})),
        "step": message(lambda: optimizer.step(closure=lambda: None)),
        "stranger": message(lambda: optimizer.add_param_group({"params": [stranger]}), ValueError),
        "nvme": message(lambda: engine.offload_states(device="nvme")),
    }
    told |= {name: message(lambda n=name: getattr(optimizer, n), AttributeError) for name in ABSENT}
    after = whole(engine.module)
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert not any(hasattr(optimizer, name) for name in ABSENT)
    engine.destroy()
    return told


def metrics(stage: int) -> dict[str, Any]:
    """The metrics of each step, what they ought to be, and what DeepSpeed's CSV monitor wrote."""
    with shared_folder() as folder:
        return _metrics(stage, folder)


def _metrics(stage: int, folder: str) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
    model = param_groups_jobs.network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    more = {"csv_monitor": monitor, "train_micro_batch_size_per_gpu": 4}
    optimizer = ds_ext.AdaLomo(groups, lr=0.01)
    engine = engines.start(model, optimizer, stage, gradient_clipping=0.2, **more)
    told, expected = [], []
    for step in range(3):
        before = whole(engine.module)
        engine.backward(param_groups_jobs.loss_of(engine, step, dist.get_rank()))
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
