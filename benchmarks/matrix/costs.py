"""Measures the costs of a candidate's step: its time, and its live bytes.

Each candidate runs in its own process. The step and a forward and backward pass of a second model,
which drops its gradients, are timed in turns and compared within a round. Bytes are those of
storages from allocation to release.
"""

import copy
import gc
import json
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

FILE = "costs.json-lines"  # not .jsonl, the ending of stored runs


def isolated(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns the result of a module's function in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure(
    model: nn.Module, candidate: Candidate, batches: list[Batch], rounds: int
) -> dict[str, Any]:
    """Returns the costs of a candidate's steps, as a line of JSON.

    Seconds are CPU time of the process, which excludes other processes.

    Args:
        model: the model to train.
        candidate: the optimizer.
        batches: a batch per step, repeated if there are more steps.
        rounds: the number of timed steps, after one that is not timed.
    """
    alone = copy.deepcopy(model)
    parameters = sum(p.numel() for p in model.parameters())
    with LiveMemory(model.parameters()) as watch:
        stepper = candidate.make(model, candidate.start, 0)
        for batch in batches[:2]:  # the first creates the state
            stepper.step(batch)
            gc.collect()
            held, watch.most = watch.now, watch.now
        stepper.step(batches[1])
        peak = watch.most
    seconds, bare = _timed(stepper.step, _backward(alone), batches, rounds)
    stepper.close()
    weights = sum(p.nbytes for p in stepper.model.parameters())
    ratios = [a / b for a, b in zip(seconds, bare, strict=True)]
    return {
        "parameters": parameters,
        "weights": weights,
        "held": held,
        "peak": peak,
        "seconds": round(statistics.median(seconds), 4),
        "alone": round(statistics.median(bare), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _backward(model: nn.Module) -> Callable[[Batch], None]:
    """Runs only forward and backward. Gradients are freed at once."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return lambda batch: model(**batch).loss.backward()


def _timed(
    step: Callable[[Batch], Any], alone: Callable[[Batch], None], batches: list[Batch], rounds: int
) -> tuple[list[float], list[float]]:
    """The seconds of each round's step, and of forward and backward alone on the same batch."""
    found: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        batch = batches[i % len(batches)]
        for times, call in zip(found, (step, alone), strict=True):
            began = time.process_time()
            call(batch)
            times.append(time.process_time() - began)
    return found[0][1:], found[1][1:]


def read(folder: Path, dtype: str) -> dict[str, Line]:
    """Returns the measured line of each candidate. The last line of a candidate counts."""
    path = folder / FILE
    found = lines.read(path) if path.exists() else []
    return {line["candidate"]: line for line in found if line["dtype"] == dtype}


def add(folder: Path, line: Line) -> None:
    """Appends a line."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def shown(line: Line) -> dict[str, object]:
    """Returns a row of the table of costs. Bytes are in units of 10⁹."""
    n = line["parameters"]
    return {
        "seconds a step": line["seconds"],
        "time / forward and backward": f"{line['ratio']:.2f}",
        "held between steps, bytes a parameter": round(line["held"] / n, 3),
        "most alive in a step, GB": line["peak"] / 1e9,
    }
