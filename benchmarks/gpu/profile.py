"""One step inside backward, profiled: idle time, overlap of streams, and host time of a bucket.

torch.profiler records when each kernel and copy runs, and on which stream. The GPU is idle between
the first kernel and the last when no stream runs any. Streams overlap when two of them run at once.
Host time is measured without the profiler, around the hooks of gradients and the last bucket.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn

import ds_ext
from benchmarks.gpu.setting import Row, Rows, Setting
from benchmarks.memory import OURS, llama
from ds_ext.backward.buckets import Buckets
from ds_ext.optimizer import RuleOptimizer

OPTIMIZER = "AdaLomo"
WARM_UP = 3  # steps
Interval = tuple[float, float, int]  # start and end in µs, stream


def rows(on: Setting) -> Rows:
    """Profiles a step for each bucket size."""
    model = llama(on.small, torch.bfloat16, on.device)
    tokens = torch.randint(0, on.small[0], (1, on.length), device=on.device)
    optimizer = OURS[OPTIMIZER].for_model(model)
    for size in on.bucket_sizes:
        spent: list[float] = []
        with (
            mock.patch.object(Buckets, "take", timed(Buckets.take, spent)),
            mock.patch.object(Buckets, "finish", timed(Buckets.finish, spent)),
        ):
            yield OPTIMIZER, profiled(model, optimizer, tokens, size, spent, on)


def profiled(
    model: nn.Module,
    optimizer: RuleOptimizer,
    tokens: torch.Tensor,
    size: int,
    spent: list[float],
    on: Setting,
) -> Row:
    """Trains some steps by buckets of ``size`` elements, and profiles the last."""
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=size)

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    on.sync()
    spent.clear()
    began = time.perf_counter()
    step()
    on.sync()
    wall, host = time.perf_counter() - began, sum(spent)
    found = of_intervals(intervals(step, on))
    buckets = len(fused.buckets.pieces(list(model.parameters())[::-1]))
    fused.remove()
    return {
        "elements of a bucket": size,
        "buckets": buckets,
        "step, ms": wall * 1e3,
        "host, µs a bucket": host / buckets * 1e6,
        **found,
    }


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Returns a method that also notes its seconds."""

    def noting(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args)
        finally:
            spent.append(time.perf_counter() - began)

    return noting


def intervals(step: Callable[[], None], on: Setting) -> list[Interval]:
    """Returns when kernels and copies of a step ran. A rehearsal takes the CPU's operations."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU if on.is_rehearsal else kinds.CUDA]) as made:
        step()
        on.sync()
    wanted = torch.autograd.DeviceType.CPU if on.is_rehearsal else torch.autograd.DeviceType.CUDA
    return [_interval(event) for event in made.events() if _is_work(event, wanted)]


def _is_work(event: Any, wanted: Any) -> bool:
    return event.device_type == wanted and not getattr(event, "is_user_annotation", False)


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end, event.device_resource_id


def of_intervals(found: Iterable[Interval]) -> Row:
    """Returns milliseconds from the first start to the last end, and how they were used."""
    busy = overlap = 0.0
    running: dict[int, int] = {}  # kernels that run, by stream
    # An end before a start of the same time: one kernel follows the other.
    edges = sorted(
        edge for start, end, stream in found for edge in ((start, 1, stream), (end, -1, stream))
    )
    edges.sort(key=lambda edge: edge[:2])
    before = edges[0][0] if edges else 0.0
    began = before
    for at, change, stream in edges:
        busy += (at - before) * bool(running)
        overlap += (at - before) * (len(running) > 1)
        running[stream] = running.get(stream, 0) + change
        if not running[stream]:
            del running[stream]
        before = at
    return {
        "span, ms": (before - began) / 1e3,
        "idle, ms": (before - began - busy) / 1e3,
        "overlap, ms": overlap / 1e3,
        "streams": len({stream for _, _, stream in edges}),
    }
