"""The time in which the GPU waits for the host: gaps between the kernels of a training step.

torch.profiler notes when each kernel and copy runs, on all streams, in one step of the small model
that is stepped inside backward. A rehearsal takes torch's operations on the CPU for kernels.
"""

from collections.abc import Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting
from benchmarks.memory import ADAMW, fine_tuning, llama

OPTIMIZERS = ("AdaLomo", "LOMO", "FlashAdamW", "GaLoreAdamW", "Muon", ADAMW)
WARM_UP = 3  # steps before the one that is measured
LONG = 20.0  # microseconds: more than a launch takes


def rows(on: Setting) -> Rows:
    """Measures a step of each optimizer."""
    for name in on.some(OPTIMIZERS):
        yield "One training step", measured(on, name)
        on.release()


def measured(on: Setting, name: str) -> Row:
    """Returns the span of a step on the device, and how much of it the device was idle, in ms."""
    model = llama(on.small, torch.bfloat16, on.device)
    step = fine_tuning(model, name, torch.randint(0, on.small[0], (1, on.length), device=on.device))
    for _ in range(WARM_UP):
        step()
    on.sync()
    kind = ProfilerActivity.CPU if on.is_rehearsal else ProfilerActivity.CUDA
    with profile(activities=[kind]) as profiler:
        step()
        on.sync()
    device = DeviceType.CPU if on.is_rehearsal else DeviceType.CUDA
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == device
    ]
    idle = gaps(spans)
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "optimizer": name,
        "kernels": len(spans),
        "span, ms": span / 1e3,
        "idle, ms": sum(idle) / 1e3,
        "longest gap, ms": max(idle, default=0.0) / 1e3,
        f"gaps over {LONG:.0f} µs": sum(gap > LONG for gap in idle),
        "verdict": RIGHT if 0 <= sum(idle) < span else WRONG,
    }


def gaps(spans: Iterable[tuple[float, float]]) -> list[float]:
    """Returns the times in which none of several intervals runs, between the first and the last."""
    found, until = [], None
    for start, end in sorted(spans):
        if until is not None and start > until:
            found.append(start - until)
        until = end if until is None else max(until, end)
    return found
