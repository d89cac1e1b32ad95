"""One run of a matrix: a model is trained on batches, and measured on rows that are held out."""

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

WARMUP, LEAST = 0.1, 0.1  # part of the steps that warm up; the last rate, as a part of the peak


@dataclass(frozen=True)
class Measured:
    """What a model makes of held-out rows."""

    loss: float  # nats per token of the answers
    accuracy: float  # part of the rows whose whole answer greedy decoding gives


def schedule(step: int, steps: int) -> float:
    """Returns the learning rate of a step from 0 on, as a part of the peak: warm-up, cosine."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def measure(model: nn.Module, batches: list[Batch]) -> Measured:
    """Returns the mean loss of all answers' tokens, in fp32, and the rows that are wholly right.

    A row whose every token is the most likely one after those before it is what greedy decoding
    gives, so accuracy is exact match without generating.
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
    """Returns what a run gave, as a line of JSON has it.

    Args:
        model: is copied, so that it can be trained again.
        candidate: what steps it.
        lr: peak learning rate.
        seed: of what the optimizer and adapters draw.
        batches: one for each step.
        tests: what is held out.
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
