"""One run of a matrix: trains a model on batches, and measures it on held-out rows."""

import copy
import gc
import math
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.matrix.candidates import Candidate
from benchmarks.matrix.texts import Batch

WARMUP, LEAST = 0.1, 0.1  # the share of warm-up steps; the last rate relative to the peak


@dataclass(frozen=True)
class Measured:
    """A model's results on held-out rows."""

    loss: float  # nats per token of the answers
    accuracy: float  # share of rows that greedy decoding answers correctly


def schedule(step: int, steps: int) -> float:
    """Returns the relative learning rate of a step, counted from 0: warm-up, then cosine."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def measure(model: nn.Module, batches: list[Batch]) -> Measured:
    """Returns the mean loss of all answer tokens in fp32, and the share of correct rows.

    A row is correct if each token is the most likely one after the tokens before it. Greedy
    decoding gives such rows, so the accuracy equals exact match without generation.
    """
    model.eval()
    total, tokens, right, rows = 0.0, 0, 0, 0
    for batch in batches:
        given = {k: batch[k] for k in ("input_ids", "attention_mask")}
        labels = batch["labels"][:, 1:]
        asked = labels != -100
        logits = model(**given).logits[:, :-1][asked].float()
        total += float(F.cross_entropy(logits, labels[asked], reduction="sum"))
        tokens += len(logits)
        hits = torch.ones_like(asked)
        hits[asked] = logits.argmax(-1) == labels[asked]
        right += int(hits.all(1).sum())
        rows += len(labels)
    model.train()
    return Measured(total / tokens, right / rows)


def run(
    model: nn.Module,
    candidate: Candidate,
    lr: float,
    seed: int,
    batches: list[Batch],
    tests: list[Batch],
) -> dict[str, Any]:
    """Returns the results of a run, as a line of JSON.

    Args:
        model: the model, of which a copy is trained.
        candidate: the optimizer.
        lr: the peak learning rate.
        seed: the seed of the optimizer and of adapters.
        batches: a batch per step.
        tests: the held-out batches.
    """
    torch.manual_seed(seed)
    stepper = candidate.make(copy.deepcopy(model), lr, seed)
    losses, seconds = [], []
    try:
        for step, batch in enumerate(batches):
            stepper.rate(schedule(step, len(batches)))
            began = time.perf_counter()
            losses.append(round(float(stepper.step(batch)), 4))
            seconds.append(time.perf_counter() - began)
            if not math.isfinite(losses[-1]):
                break
        diverged = not math.isfinite(losses[-1])
        found = Measured(math.nan, 0.0) if diverged else measure(stepper.model, tests)
    finally:
        stepper.close()
        del stepper
        gc.collect()
    return {
        "loss": round(found.loss, 5),
        "accuracy": round(found.accuracy, 5),
        "train": [loss if math.isfinite(loss) else None for loss in losses],
        "seconds": round(statistics.median(seconds), 4),
        "load": round(os.getloadavg()[0], 1),
    }
