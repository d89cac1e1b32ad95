"""Speed of complete training steps: ds_ext's AdaLomo and AdamW under ZeRO-3, and the bare model.

One process trains on random weights and tokens. Runs take turns, and are compared within a round.
The unit is forward and backward of the same weights without DeepSpeed, which drops each gradient.
An engine that drops all gradients except that of one vector shows DeepSpeed's own time. On a GPU,
each engine runs in its own process, because two do not fit. Peak memory is measured.
"""

import argparse
import gc
import os
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.memory import DTYPES, LLAMAS, Sizes, drop, llama

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    models = ["1B", "3B", "7B", "13B"] if on_gpu else ["10M"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models)
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


@dataclass(frozen=True)
class Found:
    """The time and memory of a run."""

    seconds: list[float]  # seconds of each round
    peak: int  # bytes; 0 if not measured
    floor: int  # bytes of weights, largest gradient and activations


def main(args: argparse.Namespace) -> None:
    """Times all models, and writes the table and the plot."""
    rows: list[dict[str, Any]] = []
    for model in args.models:
        job = Job(model, (args.batch, args.length), args.dtype, args.rounds)
        jobs = [job]
        if torch.cuda.is_available():
            jobs = [replace(job, runs=runs) for runs in ((ALONE, PLAIN, OURS), (BARE,), (ADAMW,))]
        found: dict[str, Found] = {}
        for part in jobs:
            found |= isolated(part)
        rows += [row(job, run, found) for run in job.runs]
        print(report.table(rows[-len(job.runs) :]), flush=True)
    text = TEXT.format(bare=BARE, load=os.getloadavg()[1], cpus=os.cpu_count(), **vars(args))
    title = "Speed of a whole training step"
    shown = rows if torch.cuda.is_available() else [relative(row) for row in rows]
    report.write("train", title, text, {"Steps": shown}, lambda figure: draw(figure, rows))


def relative(row: Mapping[str, object]) -> dict[str, object]:
    """Returns a row without absolute values, which depend on the load of the machine."""
    return {key: value for key, value in row.items() if key not in ABSOLUTE}


TEXT = """
One process trains a Llama with random {dtype} weights on {batch} × {length} random tokens per step,
without activation checkpointing. The runs are: ds_ext's AdaLomo and torch's AdamW (`"torch_adam":
true`) under DeepSpeed's ZeRO-3; `fuse_into_backward` of ds_ext without DeepSpeed; and only forward
and backward, which free each gradient at once, without optimizer and DeepSpeed. "{bare}" shows
DeepSpeed's own part: an engine that drops each gradient except that of the last norm, which AdaLomo
steps. Times are medians of {rounds} rounds, in which the runs take turns. Ratios are medians of the
ratios within a round, with the minimum in brackets. On a GPU, this engine and AdamW's each have
their own process, so their rounds come later. "Weights + largest gradient + activations" is
measured too: activations are the bytes that one forward pass leaves allocated. If the machine's
load in the last minutes, {load:.0f} on {cpus} cores, is more than 1, other processes used it too.
"""


def isolated(job: Job) -> dict[str, Found]:
    """Returns the results of ``job`` in a new process; empty if it runs out of memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, job).result()
        except torch.OutOfMemoryError:
            return {}


def measure(job: Job) -> dict[str, Found]:
    """Returns the results of ``job`` in this process."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
    join_world_of_one()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    engines = {run: engine_of(job, run, device) for run in job.runs if run in OPTIMIZERS}
    steps = {run: engine_step(engine, job, device) for run, engine in engines.items()}
    floor = 0
    if ALONE in job.runs:
        alone, fused = (sharing(engines[OURS], job, device) for _ in range(2))
        for param in alone.parameters():
            param.register_post_accumulate_grad_hook(drop)
        steps[ALONE] = plain_step(alone, job, device)
        steps[PLAIN] = fused_step(fused, job, device)
        floor = least(alone, tokens(job, device)) if on_gpu else 0
    gc.collect()
    times = report.interleaved(steps, job.rounds, torch.cuda.synchronize if on_gpu else _nothing)
    peaks = {run: peak(step) if on_gpu else 0 for run, step in steps.items()}
    torch.distributed.destroy_process_group()
    return {run: Found(times[run], peaks[run], floor) for run in steps}


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


def _nothing() -> None:
    """Does nothing: the CPU needs no synchronization."""


def peak(step: Callable[[], None]) -> int:
    """Returns the peak bytes on a GPU in a step."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def least(model: nn.Module, batch: Tensor) -> int:
    """Returns the bytes of weights, the largest gradient, and the activations of a forward pass."""
    sizes = [param.nbytes for param in model.parameters()]
    before = torch.cuda.memory_allocated()
    loss = model(batch, labels=batch).loss
    activations = torch.cuda.memory_allocated() - before
    del loss
    return sum(sizes) + max(sizes) + activations


UNITS = (ALONE, BARE, ADAMW)


def row(job: Job, run: str, found: Mapping[str, Found]) -> dict[str, object]:
    """Returns a row of the table."""
    shown: dict[str, object] = {"model": job.model, "run": run}
    columns = ["s", "tokens/s", *(f"time / {unit}" for unit in UNITS), "peak, GB", FLOOR]
    if run not in found:
        return shown | dict.fromkeys(columns) | {"s": "does not fit"}
    own = found[run]
    seconds = statistics.median(own.seconds)
    figures = [
        seconds,
        job.shape[0] * job.shape[1] / seconds,
        *(_ratio(found, run, unit) for unit in UNITS),
        own.peak / 1e9 or None,
        own.floor / 1e9 or None,
    ]
    return shown | dict(zip(columns, figures, strict=True))


FLOOR = "weights + largest gradient + activations, GB"
ABSOLUTE = ("s", "tokens/s", "peak, GB", FLOOR)


def _ratio(found: Mapping[str, Found], run: str, unit: str) -> str | None:
    """The median and minimum of a run's time relative to ``unit``, if both fit."""
    if unit not in found:
        return None
    median, low = report.ratios({name: f.seconds for name, f in found.items()}, unit)[run]
    return f"{median:.2f} ({low:.2f})"


def draw(figure: "Figure", rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws bars of speed, with a panel per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, model in zip(figure.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        speeds = [row["tokens/s"] or 0 for row in own]
        unit = 1 if torch.cuda.is_available() else speeds[0]
        axes.barh([row["run"] for row in own], [speed / unit for speed in speeds])
        axes.set(title=model)
        axes.invert_yaxis()
    on_gpu = torch.cuda.is_available()
    axes.set(xlabel="tokens per second" if on_gpu else f"speed / that of {ALONE}")
