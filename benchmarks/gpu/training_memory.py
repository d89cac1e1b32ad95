"""Memory and speed of fine-tuning a model of 7B: random bf16 weights, activation checkpointing.

"active" is the peak of memory that a tensor or a
stream still uses. It includes tensors that were freed while another stream may read them, which
``max_memory_allocated`` leaves out. "reserved" is what torch took from the GPU. Speeds are medians
of turns of some steps; "none" drops each gradient.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import ds_ext
from benchmarks import report
from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting
from benchmarks.memory import ADAMW, NONE, OURS, drop, fine_tuning, llama

OPTIMIZERS = ("LOMO", "AdaLomo", "CAME", "Adafactor", "FlashAdamW")
TIMED = (NONE, "LOMO", "AdaLomo", "FlashAdamW", ADAMW)  # which fit into 80 GB together
PAPER = {"LOMO": 14.6, ADAMW: 102.2}  # GB, LOMO's table 1: 7B, 8 rows of 512 tokens, checkpointing
WARM_UP = 2  # steps before memory is measured
TURN = 4  # steps of an optimizer that are timed before the next one's turn


def rows(on: Setting) -> Rows:
    """Trains with each optimizer, and with LOMO on the batch of its paper."""
    whole = (1, on.length)
    runs = [(name, whole) for name in (*on.some(OPTIMIZERS), ADAMW)]
    runs.append(("LOMO", (8, max(1, on.length // 4))))
    for name, shape in runs:
        row = measured(on, name, shape)
        on.release()
        paper = PAPER.get(name) if shape != whole else None
        yield "Memory", row | {"paper, GB": paper}
    yield from speeds(on)


def speeds(on: Setting) -> Rows:
    """Times steps of one model by several optimizers that take turns."""
    model = checkpointed(on)
    tokens = torch.randint(0, on.large[0], (1, on.length), device=on.device)
    names = TIMED if not on.is_rehearsal else (NONE, ADAMW)
    optimizers = {name: optimizer_of(model, name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
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
    by_none, by_adamw = (report.ratios(times, unit) for unit in (NONE, ADAMW))
    for name, own in times.items():
        yield (
            "Speed",
            {
                "optimizer": name,
                "tokens/s": on.length / statistics.median(own),
                f"time / {NONE}": by_none[name][0],
                f"time / {ADAMW}": by_adamw[name][0],
            },
        )


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


def checkpointed(on: Setting) -> nn.Module:
    """Returns the large model, which checkpoints its layers."""
    model = llama(on.large, torch.bfloat16, on.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def measured(on: Setting, name: str, shape: tuple[int, int]) -> Row:
    """Trains, and returns memory in GB (10^9 bytes), and losses."""
    row: Row = {"optimizer": name, "rows × tokens": f"{shape[0]} × {shape[1]}"}
    columns = ("weights, GB", "active, GB", "allocated, GB", "reserved, GB", "losses")
    try:
        found = trained(on, name, shape)
    except torch.OutOfMemoryError:
        return row | dict.fromkeys(columns) | {"losses": "does not fit", "verdict": RIGHT}
    return row | found


def trained(on: Setting, name: str, shape: tuple[int, int]) -> Row:
    """The same, if it fits."""
    model = checkpointed(on)
    tokens = torch.randint(0, on.large[0], shape, device=on.device)
    weights = sum(p.nbytes for p in model.parameters())
    losses: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, out: losses.append(out.loss.detach()))
    step = fine_tuning(model, name, tokens)
    for _ in range(WARM_UP):
        step()
    on.sync()
    if not on.is_rehearsal:
        torch.cuda.reset_peak_memory_stats(on.device)
    for _ in range(on.steps // 4):
        step()
    on.sync()
    first, last = float(losses[0]), float(losses[-1])
    stats = {} if on.is_rehearsal else torch.cuda.memory_stats(on.device)
    peaks = {
        f"{kind}, GB": stats[f"{kind}_bytes.all.peak"] / 1e9 if stats else None
        for kind in ("active", "allocated", "reserved")
    }
    return {
        "weights, GB": weights / 1e9,
        **peaks,
        "losses": f"{first:.2f} → {last:.2f}",
        "verdict": RIGHT if math.isfinite(last) and last != first else WRONG,
    }
