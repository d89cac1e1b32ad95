"""What a step of a candidate costs: seconds beside forward and backward alone, and bytes alive.

Each candidate is measured in a process of its own. Seconds are taken in turns, the step and a
forward and backward pass of a second model whose gradients are dropped, and compared within a
round. Bytes are those of storages, counted from when they are made until they are freed.
"""

import copy
import gc
import json
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.matrix import lines
from benchmarks.matrix.candidates import Candidate
from benchmarks.matrix.lines import Line
from benchmarks.matrix.texts import Batch
from ds_ext.planner.live_memory import LiveMemory

FILE = "costs.json-lines"  # not .jsonl, which are runs


def isolated(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns what a function of a module gives in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure(
    model: nn.Module, candidate: Candidate, batches: list[Batch], rounds: int
) -> dict[str, Any]:
    """Returns what steps of a candidate cost, as a line of JSON has it.

    Seconds are of the process, so that other programs' turns on the core do not count.

    Args:
        model: is trained.
        candidate: what steps it.
        batches: one for each step; more steps take them again from the first.
        rounds: how many steps are timed, after one that is not.
    """
    alone = copy.deepcopy(model)
    parameters = sum(p.numel() for p in model.parameters())
    with LiveMemory(model.parameters()) as watch:
        stepper = candidate.make(model, candidate.start, 0)
        for batch in batches[:2]:  # the state is there after the first
            stepper.step(batch)
            gc.collect()
            held, watch.most = watch.now, watch.now
        stepper.step(batches[1])
        peak = watch.most
    resident = most_resident()
    seconds, bare = _timed(stepper.step, _backward(alone), batches, rounds)
    stepper.close()
    weights = sum(p.nbytes for p in stepper.model.parameters())
    ratios = [a / b for a, b in zip(seconds, bare, strict=True)]
    return {
        "parameters": parameters,
        "weights": weights,
        "held": held,
        "peak": peak,
        "resident": resident,
        "seconds": round(statistics.median(seconds), 4),
        "alone": round(statistics.median(bare), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _backward(model: nn.Module) -> Callable[[Batch], None]:
    """Forward and backward alone: gradients are dropped as they appear."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return lambda batch: model(**batch).loss.backward()


def _timed(
    step: Callable[[Batch], Any], alone: Callable[[Batch], None], batches: list[Batch], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each round's step, and of its forward and backward alone, on the same batch."""
    found: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        batch = batches[i % len(batches)]
        for times, call in zip(found, (step, alone), strict=True):
            began = time.process_time()
            call(batch)
            times.append(time.process_time() - began)
    return found[0][1:], found[1][1:]


def most_resident() -> int:
    """Returns the most bytes that this process has had in main memory at once."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "Linux tells it"
    return 1024 * int(found[1])


def read(folder: Path, dtype: str) -> dict[str, Line]:
    """Returns candidate -> line of what is measured; the last line of a candidate counts."""
    path = folder / FILE
    found = lines.read(path) if path.exists() else []
    return {line["candidate"]: line for line in found if line["dtype"] == dtype}


def add(folder: Path, line: Line) -> None:
    """Appends a line."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def shown(line: Line) -> dict[str, object]:
    """Returns a row of the table of costs; bytes in units of 10⁹."""
    n = line["parameters"]
    return {
        "seconds a step": line["seconds"],
        "time / forward and backward": f"{line['ratio']:.2f}",
        "held between steps, bytes a parameter": round(line["held"] / n, 3),
        "most alive in a step, GB": line["peak"] / 1e9,
        "resident, GB": line["resident"] / 1e9,
    }
