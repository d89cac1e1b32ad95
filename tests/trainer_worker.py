"""One rank of HF Trainer and accelerate runs with the shipped configs; rank 0 saves the results.

Usage: torchrun --nproc_per_node N -m tests.trainer_worker FOLDER
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from transformers import AutoModelForCausalLM, TrainingArguments

import ds_ext  # noqa: F401 (registers the optimizers, all that a script has to do)
from tests.trainer_jobs import ARGUMENTS, JOBS, Sequential, data

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
ROOT = Path(__file__).parent.parent


def config(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A shipped config; ``changes`` add sections to it."""
    made = json.loads((ROOT / "configs" / f"{name}_zero3.json").read_text())
    made["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    made["zero_optimization"]["reduce_bucket_size"] = 5000
    return made | changes


def train(folder: Path, name: str) -> dict[str, Any]:
    """HF Trainer, unchanged, with a config from configs/."""
    job = JOBS[name]
    arguments = TrainingArguments(
        output_dir=str(folder / name),
        per_device_train_batch_size=4 // int(os.environ["WORLD_SIZE"]),
        deepspeed=config(job.config, job.changes),
        **ARGUMENTS | job.arguments,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = Sequential(model=model, args=arguments, train_dataset=data())
    trainer.train()
    trainer.save_model(str(folder / name))
    engine = trainer.model_wrapped
    return {
        "log": trainer.state.log_history,
        "decays": {
            engine.param_names[p]: group["weight_decay"]
            for group in engine.optimizer.param_groups
            for p in group["params"]
        },
        "kept": sum(p.grad is not None for p in model.parameters()),
    }


def refused(folder: Path, name: str) -> str:
    try:
        train(folder, name)
    except ValueError as error:
        return str(error)
    return ""


def loop(folder: Path) -> dict[str, Any]:
    """accelerate's own loop with an optimizer and a scheduler from the config."""
    schedule = {"warmup_num_steps": 2, "warmup_max_lr": "auto", "total_num_steps": "auto"}
    made = config("adalomo", {"scheduler": {"type": "WarmupDecayLR", "params": schedule}})
    made["bf16"]["enabled"] = False
    made["gradient_clipping"] = 0.0
    made["gradient_accumulation_steps"] = 1
    PartialState(cpu=True)  # without a GPU accelerate finds other ranks only if told
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=made))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = DummyOptim(model.parameters(), lr=0.1, weight_decay=0.0)
    scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(data()[:4], batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(20):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "norm": model.get_global_grad_norm(), "lr": model.get_lr()}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in ["accelerate", *JOBS]:  # in this order: Trainer resets accelerate's state
        try:
            if name == "accelerate":
                results[name] = loop(folder)
            elif JOBS[name].refused:
                results[name] = refused(folder, name)
            else:
                results[name] = train(folder, name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(name, results[name]["error"], flush=True)
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
