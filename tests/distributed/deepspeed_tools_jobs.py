"""What DeepSpeed's tools read of our checkpoints, and we of those of its AdamW: jobs."""

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32

from tests.common.ranks import logged, shared_folder
from tests.distributed.resume_jobs import BITS, model_of, start, steps, whole


def tools(way: str, stage: int) -> dict[str, Any]:
    """What DeepSpeed's own tools make of a checkpoint of ours."""
    with shared_folder() as folder:
        return _tools(folder, way, stage)


def _tools(name: str, way: str, stage: int) -> dict[str, Any]:
    hypers, more = BITS[way]
    gather = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    engine = start("came", stage, 7, hypers, **more, zero_optimization=gather)
    engine.module.frozen.weight.requires_grad_(False)
    steps(engine, range(3))
    engine.save_checkpoint(name)
    engine.save_16bit_model(name, "model.bin")
    weights = whole(engine)
    other = start("lamb", stage, 8, hypers, **more)
    other.load_checkpoint(name, load_module_only=True)
    third = start("lamb", (stage + 1) % 4, 8, hypers, **more)
    steps(third, range(1))
    third.load_checkpoint(name, load_optimizer_states=False)
    parts = whole(other), whole(third), len(third.optimizer.state), third.global_steps
    if dist.get_rank():
        return {}
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(name) if stage else {}
    saved = torch.load(f"{name}/model.bin", weights_only=True)
    return {
        "zero_to_fp32": {n: found[n] for n in found if n in weights},
        "weights": weights,
        "16bit": {n: saved[n] for n in weights},
        "plain": [torch.load(f, weights_only=True) is not None for f in Path(name).glob("*/*.pt")],
        "module only": parts[0],
        "no state": parts[1:],
    }


def adamw(folder: str, stage: int, dtype: str) -> dict[str, torch.Tensor]:
    """DeepSpeed's own AdamW saves."""
    model = model_of("flat")  # AdamW's clipping fails on scalars
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    steps(engine, range(1, 4))
    engine.save_checkpoint(folder)
    return whole(engine)


def from_adamw(folder: str, stage: int, dtype: str) -> dict[str, Any]:
    """What CAME makes of it, and what it logs."""
    engine = start("flat", (stage + 2) % 4, 8, bf16={"enabled": dtype == "bf16"})
    steps(engine, range(1))
    with logged() as said:
        path, _ = engine.load_checkpoint(folder)
    weights, states = whole(engine), len(engine.optimizer.state)
    steps(engine, range(1, 3))
    return {"weights": weights, "states": states, "path": path, "said": said}
