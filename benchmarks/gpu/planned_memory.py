"""Peak memory of README's planned rows: Llama 3.1 8B under DeepSpeed's ZeRO-3 on one rank.

Weights are random, layers are checkpointed, and the loss is computed in chunks. "allocated" is
torch's ``max_memory_allocated`` of steps after the first two. It has the weights that ZeRO-3
gathers for computing, which ``plan`` does not count.
"""

import argparse
import tempfile
import time

import torch
import transformers

from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting, separately
from benchmarks.gpu.zero3 import join_alone
from benchmarks.memory import config_keys
from ds_ext.planner import models, options
from ds_ext.planner.memory_plan import GIB, MemoryPlan

MODEL = "llama-3.1-8b"
RUNS = ((2, None), (1, "int8"))  # rows of a step, and how matrices are stored
WARM_UP = 2  # steps before the time is taken
GATHERED = 2 * 10**9 / GIB  # GiB: stage3_max_live_parameters in bf16, by default


def rows(on: Setting) -> Rows:
    """Trains with each way to store weights."""
    for count, storage in on.some(RUNS):
        yield "Training", separately(on, measured, on, count, storage)


def measured(on: Setting, count: int, storage: str | None) -> Row:
    """Returns the planned and the measured peak in GiB (2^30 bytes), and tokens per second."""
    import deepspeed

    join_alone(on)
    keys = transformers.LlamaConfig(**config_keys(on.large))
    config = keys if on.is_rehearsal else models.config(MODEL)
    with torch.device(on.device):
        model = models.build(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {"chunked_loss": True} | ({"weight_storage": storage} if storage else {})
    engine, *_ = deepspeed.initialize(
        model=model.train(),
        config={
            "train_micro_batch_size_per_gpu": count,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}},
            "ds_ext": section,
        },
    )
    tokens = torch.randint(0, config.vocab_size, (count, on.length), device=on.device)
    losses = []
    for step in range(WARM_UP + on.steps // 2):
        if step == WARM_UP:
            on.sync()
            began = time.perf_counter()
            if not on.is_rehearsal:
                torch.cuda.reset_peak_memory_stats(on.device)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    on.sync()
    seconds = time.perf_counter() - began
    total = planned(config, count, on.length, storage)
    stats = {} if on.is_rehearsal else torch.cuda.memory_stats(on.device)
    peaks = {
        f"{kind}, GiB": stats.get(f"{kind}_bytes.all.peak", 0) / GIB
        for kind in ("allocated", "active", "reserved")
    }
    engine.destroy()
    fits = peaks["allocated, GiB"] <= total + GATHERED
    return {
        "rows × tokens": f"{count} × {on.length}",
        "weights": storage or "bf16",
        "planned, GiB": total,
        **peaks,
        "tokens/s": count * on.length * (on.steps // 2) / seconds,
        "losses": f"{losses[0]:.2f} → {losses[-1]:.2f}",
        "verdict": RIGHT if fits and losses[-1] != losses[0] else WRONG,
    }


def planned(
    config: transformers.PretrainedConfig, count: int, length: int, storage: str | None
) -> float:
    """Returns the total of ``python -m ds_ext plan`` in GiB."""
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        line = ["--model", folder, "--optimizer", "adalomo", "--stage", "3", "--checkpointing"]
        line += ["--chunked-loss", "--batch", str(count), "--seq", str(length)]
        line += ["--weight-storage", storage] if storage else []
        found = options.read(parser.parse_args(line))
        plan = MemoryPlan(found)
        return plan.total(next(iter(plan.rows(found).values())), found.batch).total / GIB
