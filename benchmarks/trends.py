"""Growth of a step's cost with the number of parameters, the number of ranks and the bucket size.

Times are ratios between runs that are timed in turns: medians over rounds, with the minimum and
maximum in brackets. Each trend has its own page.
"""

import argparse
import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from benchmarks import host, memory, report, train
from benchmarks.memory import DTYPES, LLAMAS, Sizes, llama, shapes_of
from benchmarks.ranks import apart, on_ranks
from benchmarks.train import ADAMW, BARE, OURS, Job
from ds_ext.planner.live_memory import LiveMemory

MODELS: dict[str, Sizes] = {
    "tiny": (256, 48, 132, 2, 4, 2, False),
    "10M": train.MODELS["10M"],
    "34M": (8192, 512, 1408, 8, 8, 8, False),
    "135M": LLAMAS["135M"],
    "362M": (49152, 960, 2560, 32, 15, 5, True),  # SmolLM2-360M
    "1B": LLAMAS["1B"],
}
CPU = torch.device("cpu")
KEPT = (memory.NONE, "AdaLomo", "FlashAdamW", memory.ADAMW)  # optimizers to measure
LARGE = 2e8  # larger models are timed in fewer rounds; twice as large ones without AdamW


class Extent(NamedTuple):
    """The models, ranks and bucket sizes of the trends."""

    sizes: Sequence[str]  # models to run
    small: str  # the model on real ranks
    ranks: Sequence[int]
    buckets: Sequence[int]  # bucket sizes, in elements
    bucket: int  # the bucket size of the trend of ranks, in elements
    rounds: int


FULL = Extent(
    sizes=("10M", "34M", "135M", "362M", "1B"),
    small="10M",
    ranks=(1, 2, 4, 8),
    buckets=tuple(2**k for k in range(14, 25, 2)),
    bucket=2**20,
    rounds=9,
)
QUICK = Extent(("tiny",), "tiny", (1, 2), (2**10, 2**14), 2**14, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bf16 = torch.cpu._is_avx512_bf16_supported()
    parser.add_argument("--of", nargs="+", choices=TRENDS, default=list(TRENDS))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if bf16 else "fp32")
    parser.add_argument("--length", type=int, default=128, help="tokens per rank")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few ranks and rounds")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")


def main(args: argparse.Namespace) -> None:
    """Measures the trends, and writes a page of each."""
    torch.set_num_threads(1)  # as in all timed processes
    for name in args.of:
        TRENDS[name](args, QUICK if args.quick else FULL)


def ratio(times: Mapping[str, list[float]], run: str, unit: str) -> str:
    """Returns median, minimum and maximum over rounds; empty if a run was not timed."""
    if not {run, unit} <= times.keys():
        return ""
    ordered = sorted(a / b for a, b in zip(times[run], times[unit], strict=True))
    middle, _ = report.ratios(times, unit)[run]
    return f"{middle:.3g} ({ordered[0]:.2g}–{ordered[-1]:.2g})"


def elements(model: str) -> int:
    """Returns the number of parameters of a model."""
    return memory.elements(shapes_of(MODELS[model]))


# Parameters: runs in one process that share weights.

ALONE = "forward and backward"
WHOLE, WHOLE_ADAMW = "AdaLomo in backward", "AdamW"
STEP, STEP_ADAMW = "AdaLomo's step", "AdamW's step"
HOST, COPY = "its host", "a copy of its bytes"
PAIRS = ((WHOLE, ALONE), (WHOLE_ADAMW, ALONE), (STEP, STEP_ADAMW), (STEP, ALONE))
PAIRS += ((STEP_ADAMW, ALONE), (HOST, STEP), (COPY, STEP))


def of_parameters(args: argparse.Namespace, extent: Extent) -> None:
    """Measures seconds and bytes by number of parameters, in one process."""
    dtype = DTYPES[args.dtype]
    seconds: list[dict[str, object]] = []
    nbytes: list[dict[str, object]] = []
    for name in extent.sizes:
        n = elements(name)
        rounds = extent.rounds if n < LARGE else 3
        fits = n < 2 * LARGE
        found = apart(timed, name, args.length, dtype, rounds, fits)
        seconds.append(
            {"parameters": n, "tensors": len(shapes_of(MODELS[name]))}
            | {f"{run} / {unit}": ratio(found, run, unit) for run, unit in PAIRS}
            | {"rounds": rounds}
        )
        print(report.table(seconds[-1:]), flush=True)
        if fits:
            live = apart(lived, name, args.length, dtype)
            nbytes.append({"parameters": n} | {kept: most / n for kept, most in live.items()})
    tables = {"Seconds": seconds, "Most live bytes by parameters": nbytes}
    text = PARAMETERS.format(**vars(args))
    title = "Cost against parameters"
    report.write("trends_parameters", title, text, tables, folder=args.out)


PARAMETERS = """
Llamas with random {dtype} weights are trained on {length} random tokens, in one process with one
thread, without DeepSpeed. These runs take turns: forward and backward, which free each gradient at
once; the same with AdaLomo's step inside; and the same with torch's fused AdamW after it, with
{dtype} moments. The steps alone use the gradients of the last run: AdamW's; AdaLomo's plain
`step()`; its time on the host (native passes are called and do nothing); and a copy of weights and
gradients, which moves as many bytes as AdaLomo's step in bf16. Ratios are medians over rounds, with
the minimum and maximum in brackets. Seconds are CPU time of the process, which depends less on
other processes.

Live bytes in the second step are counted as in [memory.md](memory.md). `none` frees each gradient
at once, which is the minimum for any optimizer.
"""


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


def lived(model: str, length: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns the peak of live bytes in a step by each optimizer in ``KEPT``."""
    sizes = MODELS[model]
    return {name: memory.measure(sizes, (1, length), name, dtype, CPU) for name in KEPT}


# Ranks and buckets: jobs of real ranks.


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


class Counts(NamedTuple):
    """What is counted in the second step of an engine."""

    bytes: int  # the largest peak of live bytes of any rank
    buckets: int
    rounds: int


def counted(engine: Engine) -> Counts:
    """Counts the second step of an engine.

    It must be the only engine of its process. Otherwise the count includes small gathered
    parameters of other engines.
    """
    rounds: list[int] = []
    update = ds_ext.AdaLomo.update

    def noting(*args: Any) -> int:
        rounds.append(update(*args))
        return rounds[-1]

    with LiveMemory(()) as watch, mock.patch.object(ds_ext.AdaLomo, "update", noting):
        step = engine.step()
        step()
        gc.collect()
        watch.most = watch.now
        rounds.clear()
        step()
    most = torch.tensor(watch.most)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return Counts(int(most), len(rounds), sum(rounds))


def of_ranks(args: argparse.Namespace, extent: Extent) -> None:
    """Measures seconds and bytes by number of ranks."""
    engines = {
        run: Engine(run, extent.small, args.length, extent.bucket) for run in (BARE, OURS, ADAMW)
    }
    n = elements(extent.small)
    rows = []
    for ranks in extent.ranks:
        found = on_ranks(ranks, in_turns, engines, extent.rounds)
        row: dict[str, object] = {"ranks": ranks}
        for what, times in (("seconds", found.seconds), ("CPU seconds", found.cpu)):
            row |= {f"{what}, {run} / {BARE}": ratio(times, run, BARE) for run in (OURS, ADAMW)}
        for run in (OURS, ADAMW):
            live = on_ranks(ranks, counted, engines[run]).bytes
            row[f"live bytes / parameters, {run}"] = live / n
        rows.append(row)
        print(report.table([row]), flush=True)
    text = RANKS.format(**vars(args), **extent._asdict(), bare=BARE)
    title = "Cost against ranks"
    report.write("trends_ranks", title, text, {"Ranks": rows}, folder=args.out)


RANKS = """
Real ranks (gloo) on this machine train the Llama "{small}" in fp32 under DeepSpeed's ZeRO-3, each
on {length} random tokens and with one thread: with AdaLomo, with torch's AdamW (`"torch_adam":
true`), and with "{bare}", an engine that steps one vector and drops all other gradients. Their
steps take turns in {rounds} rounds. Ratios are medians, with the minimum and maximum in brackets.
CPU seconds are the sum over all ranks. Unlike wall time they do not include waiting: if there are
more ranks than cores, ranks wait for their turns. Live bytes are the largest peak of any rank in
its second step, including gathered weights and activations. `reduce_bucket_size` is {bucket:,}.
"""


def of_buckets(args: argparse.Namespace, extent: Extent) -> None:
    """Measures seconds and bytes by reduce_bucket_size, on two ranks."""
    engines = {f"{x:,}": Engine(OURS, extent.small, args.length, x) for x in extent.buckets}
    unit = {BARE: Engine(BARE, extent.small, args.length, extent.bucket)}
    found = on_ranks(2, in_turns, unit | engines, extent.rounds)
    n = elements(extent.small)
    rows = []
    for label, engine in engines.items():
        counts = on_ranks(2, counted, engine)
        rows.append(
            {
                "reduce_bucket_size": engine.bucket,
                "buckets": counts.buckets,
                "rounds": counts.rounds,
                f"seconds / {BARE}": ratio(found.seconds, label, BARE),
                f"CPU seconds / {BARE}": ratio(found.cpu, label, BARE),
                "live bytes / parameters": counts.bytes / n,
            }
        )
    text = BUCKETS.format(**vars(args), **extent._asdict(), bare=BARE)
    title = "Cost against reduce_bucket_size"
    report.write("trends_buckets", title, text, {"Two ranks": rows}, folder=args.out)


BUCKETS = """
Two real ranks (gloo) on this machine train the Llama "{small}" in fp32 under DeepSpeed's ZeRO-3
with AdaLomo, each on {length} random tokens and with one thread. Times are relative to "{bare}", an
engine that steps one vector and drops all other gradients. Steps take turns in {rounds} rounds.
Ratios are medians, with the minimum and maximum in brackets. CPU seconds are the sum over both
ranks. Buckets and rounds are those of a step. Live bytes are the largest peak of any rank in its
second step.
"""

TRENDS: dict[str, Callable[[argparse.Namespace, Extent], None]] = {
    "parameters": of_parameters,
    "ranks": of_ranks,
    "buckets": of_buckets,
}
