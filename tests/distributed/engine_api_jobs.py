"""Calls of DeepSpeed's public methods of an engine and its optimizer, for test_engine_api.py."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.common.ranks import message, shared_folder, whole
from tests.distributed.safe_access_jobs import Pair, loss_of

ABSENT = ("fp32_partitioned_groups_flat", "averaged_gradients", "unscale_and_clip_grads")


def start(stage: int) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "LOMO", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    return deepspeed.initialize(model=Pair(), config=config)[0]


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
        "nvme": message(lambda: engine.offload_states(device="nvme")),
    }
    told |= {name: message(lambda n=name: getattr(optimizer, n), AttributeError) for name in ABSENT}
    after = whole(engine.module)
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert not any(hasattr(optimizer, name) for name in ABSENT)
    engine.destroy()
    return told
