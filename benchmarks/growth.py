"""Measures and counts steps for ``trends``, for any model size, ranks and bucket size."""

import copy
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from benchmarks import giants, host, links, memory, outlook, report, scale, train
from benchmarks.giants import Counted, Giant
from benchmarks.memory import LLAMAS, Sizes, llama, shapes_of
from benchmarks.outlook import Given
from benchmarks.train import Job
from ds_ext.backward.gradient_config import BUCKET_SIZE, BUCKET_SIZE_ALONE
from ds_ext.planner import activations
from ds_ext.planner import memory as planner
from ds_ext.planner.live_memory import LiveMemory

MODELS: dict[str, Sizes] = {
    "tiny": (256, 48, 132, 2, 4, 2, False),
    "10M": train.MODELS["10M"],
    "34M": (8192, 512, 1408, 8, 8, 8, False),
    "135M": LLAMAS["135M"],
    "362M": (49152, 960, 2560, 32, 15, 5, True),  # SmolLM2-360M
    "1B": LLAMAS["1B"],
    "7B": LLAMAS["7B"],
}
CPU, META = torch.device("cpu"), torch.device("meta")
LINK = "400 Gb/s InfiniBand"
WIDE = {
    algorithm: Given(scale.LINKS[LINK], algorithm, 4096, 4e14) for algorithm in links.ALGORITHMS
}
KEPT = (memory.NONE, "AdaLomo", "FlashAdamW", memory.ADAMW)  # optimizers to measure


class Extent(NamedTuple):
    """The models, ranks and bucket sizes of the trends."""

    sizes: Sequence[str]  # models to run
    planned: Sequence[str]  # models to plan
    small: str  # the model on real ranks
    giant: str  # the model on simulated ranks
    real: Sequence[int]  # numbers of real ranks
    counted: Sequence[int]  # numbers of simulated ranks
    buckets: Sequence[int]  # bucket sizes on real ranks, in elements
    larger: Sequence[int]  # bucket sizes on simulated ranks
    bucket: int  # the bucket size on real ranks, in elements
    rounds: int


FULL = Extent(
    sizes=("10M", "34M", "135M", "362M", "1B"),
    planned=("10M", "34M", "135M", "362M", "1B", "7B"),
    small="10M",
    giant="7B",
    real=(1, 2, 4, 8),
    counted=tuple(2**k for k in range(3, 11)),
    buckets=tuple(2**k for k in range(14, 25, 2)),
    larger=tuple(2**k for k in range(18, 31, 2)),
    bucket=2**20,
    rounds=9,
)
QUICK = Extent(
    sizes=("tiny",),
    planned=("tiny", "10M"),
    small="tiny",
    giant="tiny",
    real=(1, 2),
    counted=(2, 4),
    buckets=(2**10, 2**14),
    larger=(2**10, 2**14),
    bucket=2**14,
    rounds=2,
)


def elements(model: str) -> int:
    """Returns the number of parameters of a model."""
    return memory.elements(shapes_of(MODELS[model]))


# One process: runs that share weights.

ALONE = "forward and backward"
WHOLE, WHOLE_ADAMW = "AdaLomo in backward", "AdamW"
STEP, STEP_ADAMW = "AdaLomo's step", "AdamW's step"
HOST, COPY = "its host", "a copy of its bytes"
SHARES = ((STEP, ALONE), (STEP_ADAMW, ALONE), (HOST, STEP), (COPY, STEP))  # ratios to plot
PAIRS = ((WHOLE, ALONE), (WHOLE_ADAMW, ALONE), (STEP, STEP_ADAMW), *SHARES)  # ratios in the table


def timed(
    model: str, length: int, dtype: torch.dtype, rounds: int, with_adamw: bool
) -> dict[str, list[float]]:
    """Returns the CPU seconds of each run in each round.

    CPU seconds of one thread depend little on other processes.
    """
    kept = llama(MODELS[model], dtype, CPU)
    params = list(kept.parameters())
    alone, inside = (sharing(kept) for _ in range(2))
    for param in alone.parameters():
        param.register_post_accumulate_grad_hook(memory.drop)
    tokens = torch.randint(0, MODELS[model][0], (1, length))
    fused = ds_ext.AdaLomo(inside.parameters(), lr=1e-6)
    ds_ext.fuse_into_backward(inside, fused)
    plain, idle = (ds_ext.AdaLomo(params, lr=1e-6) for _ in range(2))
    copied = torch.empty(max(p.numel() for p in params), dtype=dtype)

    def backward(of: nn.Module) -> None:
        of(tokens, labels=tokens).loss.backward()

    def in_backward() -> None:
        backward(inside)
        fused.step()

    def without_passes() -> None:
        with host.doing_nothing():
            idle.step()

    def copy_all() -> None:
        for p in params:
            assert p.grad is not None
            for x in (p.detach(), p.grad):
                copied[: x.numel()].copy_(x.view(-1))

    backward(kept)
    runs: dict[str, Callable[[], Any]] = {
        ALONE: lambda: backward(alone),
        WHOLE: in_backward,
        STEP: plain.step,
        HOST: without_passes,
        COPY: copy_all,
    }
    if with_adamw:
        adamw = torch.optim.AdamW(params, lr=1e-6, fused=True)

        def whole_adamw() -> None:
            adamw.zero_grad()
            backward(kept)
            adamw.step()

        runs |= {STEP_ADAMW: adamw.step, WHOLE_ADAMW: whole_adamw}
    return report.interleaved(runs, rounds, lambda: None, clock=time.process_time)


def sharing(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters share the original's memory."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def lived(model: str, length: int, dtype: torch.dtype) -> dict[str, int | None]:
    """Returns the peak of live bytes in a step by each optimizer in ``KEPT``."""
    sizes = MODELS[model]
    return {name: memory.measure(sizes, (1, length), name, dtype, CPU) for name in KEPT}


def planned(model: str, length: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns the same peaks as computed by the planner from shapes."""
    sizes, batch = MODELS[model], activations.MicroBatch(1, length, False)
    config = llama(sizes, dtype, META).config
    weights = elements(model) * dtype.itemsize
    state = {name: memory.planned_state(sizes, name) for name in KEPT if name in memory.OURS}
    state |= {memory.NONE: 0, memory.ADAMW: 2 * weights}
    # A gradient is freed at once, waits in a bucket of ds_ext, or is kept until the step.
    ours = min(BUCKET_SIZE_ALONE, max(map(math.prod, shapes_of(sizes).values())))
    buckets = dict.fromkeys(KEPT, ours) | {memory.NONE: 1, memory.ADAMW: None}
    found = {}
    for name in KEPT:
        peak = activations.peak(config, dtype, batch, activations.GradientLifetime(buckets[name]))
        found[name] = weights + peak + state[name]
    return found


# Jobs of real ranks.


class Engine(NamedTuple):
    """The settings of a DeepSpeed engine: a run of ``train``, a model and a bucket size."""

    run: str
    model: str
    length: int  # tokens
    bucket: int  # reduce_bucket_size

    def step(self) -> Callable[[], None]:
        """Returns a function that makes one step of a new engine."""
        train.MODELS.setdefault(self.model, MODELS[self.model])
        zero = (("reduce_bucket_size", self.bucket),)
        job = Job(self.model, (1, self.length), "fp32", 1, zero=zero)
        return train.engine_step(train.engine_of(job, self.run, CPU), job, CPU)


class Times(NamedTuple):
    """The times of steps in each round, by the engines' labels."""

    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]  # the sum over all ranks


def in_turns(engines: Mapping[str, Engine], rounds: int) -> Times:
    """Times the steps of several engines in turns."""
    steps = {label: engine.step() for label, engine in engines.items()}
    found = Times({label: [] for label in steps}, {label: [] for label in steps})
    for counted in [False] * 2 + [True] * rounds:
        for label, step in steps.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            step()
            all_used = torch.tensor(time.process_time() - used)
            dist.all_reduce(all_used)
            if counted:
                found.seconds[label].append(time.perf_counter() - began)
                found.cpu[label].append(all_used.item())
    return found


def lived_in(engine: Engine) -> int:
    """Returns the peak of live bytes of a rank in the second step of an engine.

    It must be the only engine of its process. Otherwise the count includes small gathered
    parameters of other engines.
    """
    with LiveMemory(()) as watch:
        step = engine.step()
        step()
        gc.collect()
        watch.most = watch.now
        step()
    most = torch.tensor(watch.most)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


# Simulated ranks.


def by_ranks(model: str, worlds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns rows with the bytes that a model's bf16 step sends and holds, by number of ranks."""
    giants.MODELS.setdefault(model, Giant(MODELS[model]))
    shapes, n = shapes_of(MODELS[model]), elements(model)
    rules = planner.rules_of(ds_ext.AdaLomo, giants.made(model)[0], {})
    rows = []
    for ranks in worlds:
        step = Counted(model, ranks, BUCKET_SIZE)
        sent = scale.sends(step, "AdaLomo")
        held = {
            "AdaLomo": planner.optimizer_memory(
                rules, shapes, 3, ranks, torch.bfloat16, BUCKET_SIZE
            ),
            memory.ADAMW: planner.adamw(shapes, 3, ranks, torch.bfloat16, BUCKET_SIZE),
        }
        rows.append(
            {key: sent[key] for key in ("ranks", "buckets", "rounds", "statistics / gradients")}
            | shares(step)
            | {f"{name}, bytes a parameter": kept.total / n for name, kept in held.items()}
        )
    return rows


def by_buckets(model: str, ranks: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns rows with the bytes that a model's step sends, by bucket size."""
    giants.MODELS.setdefault(model, Giant(MODELS[model]))
    n = elements(model)
    rows = []
    for size in sizes:
        step = Counted(model, ranks, size)
        sent = scale.sends(step, "AdaLomo")
        rows.append(
            {"reduce_bucket_size": size}
            | {key: sent[key] for key in ("buckets", "rounds", "calls")}
            | shares(step)
            | {"gradients in flight, bytes a parameter": step.in_flight / n}
        )
    return rows


def shares(step: Counted) -> dict[str, float]:
    """Returns the share of a step that rounds take according to the time model."""
    found = {algorithm: outlook.times(step, "AdaLomo", given) for algorithm, given in WIDE.items()}
    return {f"rounds / step, {algorithm}": t.rounds / t.step for algorithm, t in found.items()}
