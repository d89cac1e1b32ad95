"""Time of the host in a step: what Python and torch take of a parameter, whatever its size.

A step of many small parameters is nearly all of the host. And one of Llama-7B's parameters, whose
native passes do nothing: what remains is the host's.
"""

import argparse
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ds_ext
from benchmarks import host_gpu, report
from benchmarks.memory import LLAMAS, shapes_of
from ds_ext.backward import gradient_config
from ds_ext.ops.executors.native import library, native_table
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY

SIDE = 8  # of small parameters
BATCHED = [name for name, entry in REGISTRY.items() if entry.is_batched]
BY_MATRIX = [name for name, entry in REGISTRY.items() if not entry.is_batched]
MATRICES, SHAPE = 224, (64, 128)  # as many matrices as Llama-7B has, and small


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=300, help="small parameters")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--optimizers", nargs="+", choices=REGISTRY, default=list(REGISTRY))


def main(args: argparse.Namespace) -> None:
    """Times all of them, and writes the tables."""
    torch.set_num_threads(1)
    rows = []
    batched = [name for name in args.optimizers if name in BATCHED]
    for name in batched:
        row: dict[str, object] = {"optimizer": OPTIMIZERS[name].__name__}
        row |= small(name, args.params, args.rounds)
        row |= large(name, args.rounds)
        rows.append(row)
        print(report.table([row]), flush=True)
    found = [matrices(name, args.rounds) for name in args.optimizers if name in BY_MATRIX]
    python = f"\nPython {platform.python_version()}.\n"
    if found:
        print(report.table(found), flush=True)
        title = "Time of the host for each small matrix"
        report.write("host_matrices", title, MATRICES_TEXT + python, {"Matrices": found})
    if not batched:
        return
    tables = {"Host": rows}
    if host_gpu.are_there():
        tables["By kernels"] = [host_gpu.row(name, args.rounds) for name in batched]
        print(report.table(tables["By kernels"]), flush=True)
        tables["In backward"] = [host_gpu.in_backward(name, args.rounds) for name in batched]
        print(report.table(tables["In backward"]), flush=True)
    report.write("host", "Time of the host in a step", TEXT + host_gpu.TEXT + python, tables)


TEXT = f"""
`plain` and `in backward` are of one step of {SIDE} x {SIDE} parameters, in microseconds of each:
`optimizer.step()`, and `loss.backward()` with the step inside by the time that it takes with
gradients that are dropped. `7B` is a plain step of the 291 parameters of Llama-7B in bf16, in
milliseconds, by native passes that do nothing; it is of `buckets` of parameters that are stepped
together, in `calls` of native passes for each of them. Medians over rounds. Times of a CPU are here
because the host's time is what is measured: they say something beside one another only.
"""
MATRICES_TEXT = f"""
Optimizers whose rule steps each matrix by itself: microseconds of the process for each of
{MATRICES} matrices of {SHAPE[0]} x {SHAPE[1]} in bf16, in one bucket, the median and the least over
rounds. `plain` is `optimizer.step()`, `of 2 ranks` the step of rank 0 without the other, and `by
kernels` the same as on a GPU, with launches that do nothing and the products of a CPU. `host` is
the time without native passes and matrix products, which a GPU would compute: Python and torch's
other operations. `torch` counts the calls of torch that are no views, for each matrix of a plain
step.
"""


class Many(nn.Module):
    """Small parameters, each used once."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.randn(SIDE, SIDE) for _ in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the products of x with each, []."""
        return torch.stack([(p * x).sum() for p in self.params]).sum()


def small(name: str, n: int, rounds: int) -> dict[str, object]:
    """Microseconds of the host for each of ``n`` small parameters."""
    x = torch.randn(SIDE, SIDE)
    model, other = Many(n), Many(n)
    plain = made(name, list(other.parameters()))
    other(x).backward()
    steps: dict[str, Callable[[], object]] = {"plain": plain.step}
    fused = made(name, list(model.parameters()))
    ds_ext.fuse_into_backward(model, fused, bucket_size=gradient_config.BUCKET_SIZE)

    def in_backward() -> None:
        model(x).backward()
        fused.step()

    def dropped() -> None:
        third(x).backward()
        for p in third.parameters():
            p.grad = None

    third = Many(n)
    steps |= {"in backward": in_backward, "dropped": dropped}
    times = timed(steps, rounds)
    inside = statistics.median(
        a - b for a, b in zip(times["in backward"], times["dropped"], strict=True)
    )
    return {
        "plain, µs": statistics.median(times["plain"]) / n * 1e6,
        "in backward, µs": inside / n * 1e6,
    }


def large(name: str, rounds: int) -> dict[str, object]:
    """Milliseconds of the host in a step of Llama-7B's parameters, which nobody reads."""
    params = []
    for shape in shapes_of(LLAMAS["7B"]).values():
        params.append(nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))
        params[-1].grad = torch.empty(shape, dtype=torch.bfloat16)
    with doing_nothing(), mock.patch.object(torch, "full", host_gpu.empty):  # no states
        optimizer = made(name, params)
        optimizer.step()
        (seconds,) = timed({"step": optimizer.step}, rounds).values()
        buckets: list[int] = []
        original = type(optimizer).update

        def counted(self: RuleOptimizer, *args: Any) -> int:
            buckets.append(0)
            return original(self, *args)

        with mock.patch.object(type(optimizer), "update", counted), doing_nothing() as calls:
            optimizer.step()
    return {
        "7B, ms": statistics.median(seconds) * 1e3,
        "buckets": len(buckets),
        "calls": calls["made"] / len(buckets),
    }


def matrices(name: str, rounds: int) -> dict[str, object]:
    """Microseconds of the host for each of many small matrices, which are stepped one by one."""
    params = [nn.Parameter(torch.randn(SHAPE).bfloat16()) for _ in range(MATRICES)]
    updates = []
    for p in params:
        p.grad = torch.randn(SHAPE).bfloat16()
        shard = Shard.of_rank(SHAPE, 0, host_gpu.RANKS)
        run, grad = (x.detach().view(-1)[: len(shard)] for x in (p, p.grad))
        updates.append(RunUpdate(p, run, grad, shard))
    plain, cut, kernels = (made(name, params) for _ in range(3))
    on_cpu = {"plain": plain.step, "of 2 ranks": lambda: cut.update(updates, host_gpu.NOTHING)}
    on_gpu = {"by kernels": lambda: kernels.update(updates, host_gpu.NOTHING)}
    times = timed(on_cpu, rounds, time.process_time)
    with without_arithmetic() as clock:
        of_host = timed(on_cpu, rounds, clock)
    with host_gpu.doing_nothing():
        times |= timed(on_gpu, rounds, time.process_time)
        with without_arithmetic() as clock:
            of_host |= timed(on_gpu, rounds, clock)
    with host_gpu.Calls() as calls:
        plain.step()
    row: dict[str, object] = {"optimizer": OPTIMIZERS[name].__name__}
    for label, seconds in times.items():
        for title, found in ((label, seconds), (f"{label}: host", of_host[label])):
            row[f"{title}, µs"] = statistics.median(found) / MATRICES * 1e6
            row[f"{title}, least"] = min(found) / MATRICES * 1e6
    return row | {"torch": calls.made / MATRICES}


@contextmanager
def without_arithmetic() -> Iterator[Callable[[], float]]:
    """The time of the process, without that in native passes and in matrix products."""
    native, spent = library.load(), [0.0]

    def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            result = function(*args, **kwargs)
            spent[0] += time.process_time() - began
            return result

        return called

    class Library:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            setattr(self, name, left_out(getattr(native, name)))
            return getattr(self, name)

    products = {name: left_out(getattr(torch, name)) for name in ("addmm", "baddbmm")}
    timed_library = Library()
    with (
        mock.patch.object(library, "load", lambda: timed_library),
        mock.patch.multiple(torch, **products),
    ):
        yield lambda: time.process_time() - spent[0]


def made(name: str, params: list[nn.Parameter]) -> RuleOptimizer:
    """An optimizer that does not move weights far."""
    hypers = {"lr": 1e-6} if name != "adafactor" else {}
    return OPTIMIZERS[name](params, **hypers)


def timed(
    steps: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each in each round, in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for counted in [False] * 3 + [True] * rounds:
        for name, step in steps.items():
            began = clock()
            step()
            if counted:
                found[name].append(clock() - began)
    return found


@contextmanager
def doing_nothing() -> Iterator[Counter[str]]:
    """Native passes are called and do nothing; counts the calls."""
    calls: Counter[str] = Counter()

    class Library:
        def passes_run(self, *args: object) -> None:
            calls["made"] += 1

    if not native_table.is_available():
        raise SystemExit("There are no native passes on this machine: install a C++ compiler.")
    with (
        mock.patch.object(library, "load", Library),
        mock.patch.object(native_table, "is_available", lambda: True),
    ):
        yield calls
