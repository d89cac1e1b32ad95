"""First steps on a GPU: whether its kernels are right, then how fast steps by them are.

It needs torch, Triton and what ds_ext itself imports; no DeepSpeed. Weights after some steps by
kernels are compared with those by torch's operations on the same device, and with those of each
parameter stepped by itself, whose bits they have. Nothing is timed before that is so.
"""

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import report
from ds_ext.ops.executors.native import table
from ds_ext.ops.executors.triton import devices, launches
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY

BATCHED = [name for name, entry in REGISTRY.items() if entry.is_batched]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows of vectors and not, of two widths of strips, wider than any; vectors.
SHAPES = ((512, 1024), (96, 4096), (300, 130), (4, 17000), (3, 64, 256), (1000,), (4096,), (5,))
STEPS, WORLDS = 3, (1, 2)  # in a world of two the first rank is stepped, by its own sums
CLOSE = 1e-5  # an error, by the norm of the update
APART = 1 / 200  # of weights of 16 bits that may be rounded to the other of two numbers
ROUNDS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--optimizers", nargs="+", choices=BATCHED, default=BATCHED)
    parser.add_argument("--side", type=int, nargs="+", default=[4096, 16384], help="of a matrix")
    parser.add_argument("--only-checks", action="store_true", help="time nothing")


def main(args: argparse.Namespace) -> None:
    """Checks all of them, and times them if all is right."""
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: torch.cuda.is_available() is False.")
    device = torch.device("cuda")
    checked = []
    for name in args.optimizers:
        for dtype, world in itertools.product(DTYPES, WORLDS):
            checked.append(check(name, dtype, world, SHAPES, device))
            print(report.table(checked[-1:]), flush=True)
    wrong = [row for row in checked if row["verdict"] != "right"]
    tables_of = {"Checks": checked}
    if not wrong and not args.only_checks:
        tables_of |= {f"{side}²": timed(args.optimizers, side, device) for side in args.side}
    report.write("gpu", "Kernels on a GPU", TEXT, tables_of, None)
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(checked)} checks failed: nothing was timed.")


TEXT = f"""
`error` is of the weights after {STEPS} steps by kernels, of one rank or the first of two, against
torch's operations on the same device, by the norm of the update: {CLOSE:g} at most in fp32. Of bf16
weights, rounded stochastically, `apart` is the part that differs, {APART:g} at most. `alone` and
`again` are whether the bits are those of each parameter in an optimizer of its own, and of a second
run.

Times are of a step of one matrix in bf16: medians of {ROUNDS} in a row by the device's events,
`copy` being by those of a copy of the matrix; `host` is what it takes until `step()` returns.
"""


def check(
    name: str, dtype: str, world: int, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> dict[str, object]:
    """Whether steps by kernels are right, and why not."""
    made = functools.partial(stepped, name, dtype, shapes, device, world)
    with using_kernels(device.type):
        found = made(together=True)
        alone = all(map(torch.equal, found, made(together=False)))
        again = all(map(torch.equal, found, made(together=True)))
    with using_kernels(None):
        expected = made(together=True)
    before = [p.detach().double() for p in weights(shapes, dtype, device)]
    error = max(
        float((a.double() - b.double()).norm() / (b.double() - w).norm())
        for a, b, w in zip(found, expected, before, strict=True)
    )
    differing = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
    apart = differing / sum(x.numel() for x in found)
    is_close = math.isfinite(error) and (error <= CLOSE if dtype == "fp32" else apart <= APART)
    return {
        "optimizer": OPTIMIZERS[name].__name__,
        "dtype": dtype,
        "ranks": world,
        "error": error,
        "apart": apart,
        "alone": alone,
        "again": again,
        "verdict": "right" if is_close and alone and again else "WRONG",
    }


@contextmanager
def using_kernels(kind: str | None) -> Iterator[None]:
    """Kernels step what is on a kind of device; torch's operations if there is none."""
    with (
        mock.patch.object(devices, "DEVICES", set() if kind is None else {kind}),
        mock.patch.object(table, "is_available", lambda: False),
    ):
        yield


def weights(
    shapes: Sequence[tuple[int, ...]], dtype: str, device: torch.device
) -> list[nn.Parameter]:
    """The same weights at each call."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random).mul_(0.1) for shape in shapes]
    return [nn.Parameter(p.to(device, DTYPES[dtype])) for p in made]


def stepped(
    name: str,
    dtype: str,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    world: int,
    together: bool,
) -> list[Tensor]:
    """Weights after some steps of the first rank, in one optimizer or each in one of its own."""
    params = weights(shapes, dtype, device)
    optimizers = [optimizer_of(name, some) for some in ([params] if together else zip(params))]
    if not together:  # random bits are by a parameter's number
        for i, (optimizer, param) in enumerate(zip(optimizers, params, strict=True)):
            optimizer.number_of[param] = i
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        updates = []
        for param in params:
            shard = Shard.of_rank(tuple(param.shape), 0, world)
            grad = torch.randn(param.shape, generator=random).to(device, param.dtype).view(-1)
            run = param.detach().view(-1)[: len(shard)]
            updates.append(RunUpdate(param, run, grad[: len(shard)], shard))
        for optimizer, some in zip(
            optimizers, [updates] if together else [[u] for u in updates], strict=True
        ):
            optimizer.update(some, lambda total: None)
            optimizer.commit_weight_norms()
    return [param.detach() for param in params]


def optimizer_of(name: str, params: Sequence[Tensor]) -> RuleOptimizer:
    """An optimizer whose steps show in bf16."""
    return OPTIMIZERS[name](params, **({} if name == "adafactor" else {"lr": 1e-2}))


def timed(names: Sequence[str], side: int, device: torch.device) -> list[dict[str, object]]:
    """Times of a step of a matrix, and launches of kernels."""
    source = torch.zeros(side, side, dtype=torch.bfloat16, device=device)
    copy, _ = median(functools.partial(torch.empty_like(source).copy_, source))
    rows = []
    for name in names:
        (param,) = weights([(side, side)], "bf16", device)
        param.grad = torch.randn_like(param)
        optimizer = optimizer_of(name, [param])
        for _ in range(3):
            optimizer.step()
        launched: list[object] = []
        start = launches.launch_kernel

        def counted(*args: Any, by: Any = start, to: list[object] = launched) -> None:
            to.append(args[0])
            by(*args)

        with mock.patch.object(launches, "launch_kernel", counted):
            optimizer.step()
        ms, host = median(optimizer.step)
        rows.append(
            {
                "optimizer": OPTIMIZERS[name].__name__,
                "ms": ms,
                "copy": ms / copy,
                "host, ms": host,
                "launches": len(launched),
            }
        )
        print(report.table(rows[-1:]), flush=True)
    return rows


def median(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a step on the device, and of the host until it returns."""
    found, host = [], []
    for _ in range(ROUNDS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        before.record()
        step()
        after.record()
        host.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        found.append(before.elapsed_time(after))
    return statistics.median(found), statistics.median(host)
