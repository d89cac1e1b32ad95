"""Speed of fine-tuning by several optimizers that take turns with one model, and what limits it.

Weights are random and in bf16, and activations are checkpointed. Speeds are medians of turns of
some steps; "none" drops each gradient. "kernels" is the time of all kernels of one step, added up:
where it is far below the step's time, the GPU waits for the host.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import ds_ext
from benchmarks import report
from benchmarks.gpu.setting import RIGHT, WRONG, Rows, Setting
from benchmarks.memory import ADAMW, NONE, OURS, Sizes, drop, llama

NAMES = (NONE, "LOMO", "AdaLomo", "FlashAdamW", ADAMW)  # which fit into 80 GB together
TURN = 4  # steps of an optimizer that are timed before the next one's turn


def rows(on: Setting) -> Rows:
    """Trains the large and the small model."""
    for heading, sizes in (("7B", on.large), ("1.1B", on.small)):
        for row in speeds(sizes, on):
            yield heading, row
        on.release()


def speeds(sizes: Sizes, on: Setting) -> Iterator[dict[str, object]]:
    """Times the steps of a model."""
    model = checkpointed(sizes, on)
    tokens = torch.randint(0, sizes[0], (1, on.length), device=on.device)
    optimizers = {name: optimizer_of(model, name) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    kernels = dict.fromkeys(NAMES, 0.0)
    for _ in range(1 + on.steps // 4):
        for name, own in times.items():
            with stepped(model, name, optimizers[name], tokens) as step:
                step()  # the first one after another's turn makes tables anew
                on.sync()
                began = time.perf_counter()
                for _ in range(TURN):
                    step()
                on.sync()
                own.append((time.perf_counter() - began) / TURN)
                kernels[name] = kernels[name] or of_kernels(step, on)
    by_none, by_adamw = (report.ratios(times, unit) for unit in (NONE, ADAMW))
    for name, own in times.items():
        yield {
            "optimizer": name,
            "step, ms": statistics.median(own) * 1e3,
            "kernels, ms": kernels[name],
            "tokens/s": on.length / statistics.median(own),
            f"time / {NONE}": by_none[name][0],
            f"time / {ADAMW}": by_adamw[name][0],
            "verdict": RIGHT if kernels[name] > 0 else WRONG,
        }


def checkpointed(sizes: Sizes, on: Setting) -> nn.Module:
    """Returns a model that checkpoints its layers."""
    model = llama(sizes, torch.bfloat16, on.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer | None:
    """Returns an optimizer of a model; None for ``NONE``."""
    if name == ADAMW:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return None if name == NONE else OURS[name].for_model(model)


@contextlib.contextmanager
def stepped(
    model: nn.Module, name: str, optimizer: Any, tokens: torch.Tensor
) -> Iterator[Callable[[], None]]:
    """A context in which the function that it yields makes a step by an optimizer."""

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    if name == NONE:
        hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    else:
        hooks = [] if name == ADAMW else [ds_ext.fuse_into_backward(model, optimizer)]
    try:
        yield step
    finally:
        for hook in hooks:
            hook.remove()


def of_kernels(step: Callable[[], None], on: Setting) -> float:
    """Returns the milliseconds of all kernels of a step; in a rehearsal, of torch's operations."""
    kind = ProfilerActivity.CPU if on.is_rehearsal else ProfilerActivity.CUDA
    with profile(activities=[kind]) as profiler:
        step()
        on.sync()
    device = DeviceType.CPU if on.is_rehearsal else DeviceType.CUDA
    spans = [e.time_range for e in profiler.events() if e.device_type == device]
    return sum(span.end - span.start for span in spans) / 1e3
