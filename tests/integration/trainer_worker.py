"""One rank of HF Trainer and accelerate runs with the shipped configs; rank 0 saves the results.

Usage: torchrun --nproc_per_node N -m tests.integration.trainer_worker FOLDER [PATTERN]
"""

import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, TrainingArguments

import ds_ext  # noqa: F401 (registers the optimizers, all that a script has to do)
from tests.common.leave import leave
from tests.integration import own_loops
from tests.integration.own_loops import GROUPED, LOOPS, whole
from tests.integration.trainer_jobs import BATCH, JOBS, Job, Sequential, adapted, data

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
get_accelerator().is_fp16_supported = lambda: True  # some CPUs do not hurry with it, that is all
ROOT = Path(__file__).parents[2]


def config(name: str, stage: int = 3) -> dict[str, Any]:
    """A shipped config, with buckets and partitions of a small model's size."""
    made = json.loads((ROOT / "configs" / f"{name}_zero3.json").read_text())
    made["zero_optimization"] |= {
        "stage": stage,
        "stage3_param_persistence_threshold": 100,
        "reduce_bucket_size": 5000,
    }
    return made


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def train(folder: Path, name: str, job: Job) -> dict[str, Any]:
    """HF Trainer, unchanged, with a config from configs/."""
    ranks = dist.get_world_size()
    arguments = TrainingArguments(
        output_dir=str(folder / name),
        per_device_train_batch_size=BATCH // (ranks * job.accumulation),
        deepspeed=config(job.config, job.stage) | job.changes,
        **job.all_arguments,
    )
    model = load(folder)
    if job.lora:
        model = adapted(model)
    trainer = Sequential(
        model=model, args=arguments, train_dataset=data(), eval_dataset=data()[:BATCH]
    )
    trainer.train()
    trainer.save_model(str(folder / name))
    engine = trainer.model_wrapped
    return {
        "after": whole(engine.module),
        "log": trainer.state.log_history,
        "decays": {
            engine.param_names[p]: group["weight_decay"]
            for group in engine.optimizer.param_groups
            for p in group["params"]
        },
        "kept": sum(p.grad is not None for p in model.parameters()),
        "policy": engine.optimizer.fused.how.policy,
        "state": len(engine.optimizer.state),
        "scale": engine.optimizer.loss_scale,
        "skipped": engine.skipped_steps,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    jobs = {f"accelerate {n}": lambda p=p: accelerate(folder, p) for n, p in LOOPS.items()}
    jobs |= {n: lambda n=n, job=job: train(folder, n, job) for n, job in JOBS.items()}
    jobs |= {
        f"groups {n}": lambda n=n: own_loops.grouped(n, config(n), lambda: load(folder))
        for n in GROUPED
    }
    results: dict[str, Any] = {}
    for name, job in jobs.items():  # in this order: Trainer resets accelerate's state
        if not chosen.search(name):
            continue
        try:
            results[name] = job()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(name, results[name]["error"], flush=True)
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    leave()


def accelerate(folder: Path, loop: own_loops.Loop) -> dict[str, Any]:
    return own_loops.accelerated(loop, config(loop.config), lambda: load(folder))


if __name__ == "__main__":
    main()
