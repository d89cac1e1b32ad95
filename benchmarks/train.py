"""Speed of complete training steps: ds_ext's AdaLomo and AdamW under ZeRO-3, and the bare model.

One process trains on random weights and tokens. Runs take turns, and are compared within a round.
The unit is forward and backward of the same weights without DeepSpeed, which drops each gradient.
An engine that drops all gradients except that of one vector shows DeepSpeed's own time.
"""

import argparse
import gc
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.memory import DTYPES, LLAMAS, Sizes, drop, llama

MODELS: dict[str, Sizes] = {"10M": (8192, 256, 704, 8, 4, 4, False), **LLAMAS}
LR = 1e-5
ALONE = "forward and backward alone"
BARE = "forward and backward, ZeRO-3"
PLAIN = "AdaLomo, no DeepSpeed"
OURS = "AdaLomo, ZeRO-3"
ADAMW = "AdamW, ZeRO-3"
OPTIMIZERS = {  # the section of DeepSpeed's config
    BARE: {"type": "AdaLomo", "params": {"lr": LR}},
    OURS: {"type": "AdaLomo", "params": {"lr": LR}},
    ADAMW: {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["10M"])
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 128, help="per row")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    parser.add_argument("--rounds", type=int, default=10 if on_gpu else 20)


@dataclass(frozen=True)
class Job:
    """Runs that are timed in turns in one process."""

    model: str
    shape: tuple[int, int]  # (rows, tokens per row)
    dtype: str
    rounds: int
    runs: tuple[str, ...] = (ALONE, BARE, PLAIN, OURS, ADAMW)
    zero: tuple[tuple[str, int], ...] = ()  # other keys of "zero_optimization"


def main(args: argparse.Namespace) -> None:
    """Times all models, and writes the table."""
    rows: list[dict[str, object]] = []
    for model in args.models:
        job = Job(model, (args.batch, args.length), args.dtype, args.rounds)
        times = isolated(job)
        rows += [row(job, run, times) for run in job.runs]
        print(report.table(rows[-len(job.runs) :]), flush=True)
    text = TEXT.format(bare=BARE, load=os.getloadavg()[1], cpus=os.cpu_count(), **vars(args))
    report.write("train", "Speed of a whole training step", text, {"Steps": rows})


TEXT = """
One process trains a Llama with random {dtype} weights on {batch} × {length} random tokens per step,
without activation checkpointing. The runs are: ds_ext's AdaLomo and torch's AdamW (`"torch_adam":
true`) under DeepSpeed's ZeRO-3; `fuse_into_backward` of ds_ext without DeepSpeed; and only forward
and backward, which free each gradient at once, without optimizer and DeepSpeed. "{bare}" shows
DeepSpeed's own part: an engine that drops each gradient except that of the last norm, which AdaLomo
steps. Times are medians of {rounds} rounds, in which the runs take turns. Ratios are medians of the
ratios within a round, with the minimum in brackets. If the machine's load in the last minutes,
{load:.0f} on {cpus} cores, is more than 1, other processes used it too.
"""


def isolated(job: Job) -> dict[str, list[float]]:
    """Returns the results of ``job`` in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, job).result()


def measure(job: Job) -> dict[str, list[float]]:
    """Returns the seconds of each run of ``job`` in each round, in this process."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
    join_world_of_one()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    engines = {run: engine_of(job, run, device) for run in job.runs if run in OPTIMIZERS}
    steps = {run: engine_step(engine, job, device) for run, engine in engines.items()}
    alone, fused = (sharing(engines[OURS], job, device) for _ in range(2))
    for param in alone.parameters():
        param.register_post_accumulate_grad_hook(drop)
    steps |= {ALONE: plain_step(alone, job, device), PLAIN: fused_step(fused, job, device)}
    gc.collect()
    times = report.interleaved(
        steps, job.rounds, torch.cuda.synchronize if on_gpu else lambda: None
    )
    torch.distributed.destroy_process_group()
    return times


def join_world_of_one() -> None:
    """Sets torch.distributed's environment variables for one process if they are unset."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def engine_of(job: Job, run: str, device: torch.device) -> Any:
    """Returns a run's DeepSpeed engine."""
    import deepspeed

    import ds_ext  # noqa: F401  registers AdaLomo with DeepSpeed

    config = {
        "train_micro_batch_size_per_gpu": job.shape[0],
        "gradient_clipping": 0.0,
        "bf16": {"enabled": job.dtype == "bf16"},
        "zero_optimization": {"stage": 3, **dict(job.zero)},
        "optimizer": OPTIMIZERS[run],
    }
    model = llama(MODELS[job.model], DTYPES[job.dtype], device)
    stepped = list(model.model.norm.parameters()) if run == BARE else None
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=stepped)
    return engine


def sharing(engine: Any, job: Job, device: torch.device) -> nn.Module:
    """Returns a plain model whose weights share the memory of the engine's partitions."""
    model = llama(MODELS[job.model], DTYPES[job.dtype], device)
    for own, its in zip(model.parameters(), engine.module.parameters(), strict=True):
        own.data = its.ds_tensor[: own.numel()].view_as(own)  # one rank has the whole weight
    return model


def tokens(job: Job, device: torch.device) -> Tensor:
    return torch.randint(0, MODELS[job.model][0], job.shape, device=device)


def engine_step(engine: Any, job: Job, device: torch.device) -> Callable[[], None]:
    batch = tokens(job, device)

    def step() -> None:
        engine.backward(engine(batch, labels=batch).loss)
        engine.step()

    return step


def plain_step(model: nn.Module, job: Job, device: torch.device) -> Callable[[], None]:
    batch = tokens(job, device)
    return lambda: model(batch, labels=batch).loss.backward()


def fused_step(model: nn.Module, job: Job, device: torch.device) -> Callable[[], None]:
    import ds_ext

    backward = plain_step(model, job, device)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=LR)
    ds_ext.fuse_into_backward(model, optimizer)

    def step() -> None:
        backward()
        optimizer.step()

    return step


def row(job: Job, run: str, times: Mapping[str, list[float]]) -> dict[str, object]:
    """Returns a row of the table: medians of ratios within a round, and minima in brackets."""
    found: dict[str, object] = {"model": job.model, "run": run}
    for unit in (ALONE, BARE, ADAMW):
        median, low = report.ratios(times, unit)[run]
        found[f"time / {unit}"] = f"{median:.2f} ({low:.2f})"
    return found
