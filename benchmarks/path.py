"""Counts the Python that a step runs: calls, and the functions and files of ds_ext they reach.

The step is AdaLomo's third on one bf16 matrix: plain, under ZeRO-3, and by kernels whose launches
do nothing.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import ds_ext
from benchmarks import report
from benchmarks.ranks import on_ranks
from benchmarks.traffic import asked_for

PACKAGE = str(Path(ds_ext.__file__).parent)
STEPS, RANKS = 3, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=512, help="rows and columns of the matrix")


def main(args: argparse.Namespace) -> None:
    """Counts the three steps, and prints the table."""
    rows: list[dict[str, object]] = [
        {"step": "plain, on a CPU", **plain(args.side)},
        {"step": f"ZeRO-3, {RANKS} ranks", **on_ranks(RANKS, zero3, args.side)},
    ]
    with asked_for():
        rows.append({"step": "plain, kernels", **plain(args.side)})
    print(report.table(rows))


def plain(side: int) -> dict[str, object]:
    """Counts ``optimizer.step()``."""
    p = nn.Parameter(torch.ones(side, side, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    return of_last(ds_ext.AdaLomo([p]).step)


def zero3(side: int) -> dict[str, object]:
    """Counts the step of one rank, from the loss on."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Linear(side, side, bias=False)
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step() -> None:
        engine.backward(loss)
        engine.step()

    found: dict[str, object] = {}
    for _ in range(STEPS):
        loss = engine(torch.ones(1, side, dtype=torch.bfloat16)).float().square().mean()
        found = counted(step)
    return found


def of_last(step: Callable[[], object]) -> dict[str, object]:
    """Counts the last of ``STEPS`` calls of ``step``."""
    for _ in range(STEPS - 1):
        step()
    return counted(step)


def counted(step: Callable[[], object]) -> dict[str, object]:
    """Returns the calls of ds_ext's functions in a call of ``step``, its functions and files."""
    with profiled() as calls:
        step()
    return {
        "calls": calls.total(),
        "functions": len(calls),
        "files": len({code.co_filename for code in calls}),
    }


@contextmanager
def profiled() -> Iterator[Counter[CodeType]]:
    """Context that counts the calls of functions in files of ds_ext."""
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
