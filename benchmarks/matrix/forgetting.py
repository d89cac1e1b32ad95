"""How much fine-tuning forgets: the loss of text that the model wrote before it.

The model samples the text at temperature 1. The increase of this loss estimates the
Kullback-Leibler divergence of the fine-tuned model from the model before, in nats per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.matrix import summary
from benchmarks.matrix.lines import Lines, Point, loss_of, point_of
from benchmarks.matrix.texts import Batch

FOLDER = "forgetting"  # in the folder of the other runs
ROWS, TOKENS, SIZE = 64, 64, 16  # of the text; rows of a batch
TITLE = "Forgetting"


@torch.no_grad()
def written(model: nn.Module, start: int, rows: int = ROWS, tokens: int = TOKENS) -> list[Batch]:
    """Returns rows that a model writes after the token ``start``; each token is a label.

    The end of the text is excluded, so that all rows have the same length.
    """
    torch.manual_seed(0)
    model.eval()
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    how |= {"min_new_tokens": tokens - 1, "max_new_tokens": tokens - 1}
    ids = model.generate(torch.full((rows, 1), start), attention_mask=torch.ones(rows, 1), **how)
    model.train()
    mask = torch.ones_like(ids)
    return [
        {"input_ids": some, "attention_mask": ones, "labels": some}
        for some, ones in zip(ids.split(SIZE), mask.split(SIZE), strict=True)
    ]


def missing(
    lines: Lines, done: Lines, data: Sequence[str], names: Sequence[str], seeds: int
) -> Iterator[Point]:
    """Yields the runs to repeat: those at each candidate's best rate, the first seed first."""
    there = {point_of(line) for line in done.all}
    for seed, name, candidate in product(range(seeds), data, names):
        best = summary.best_of(lines, name, candidate)
        if best and (point := Point(name, candidate, best.lr, seed)) not in there:
            yield point


def table(done: Lines, data: Sequence[str], labels: Mapping[str, str]) -> list[dict[str, object]]:
    """Returns the increase of the loss by optimizer, with a column for each data set."""
    rows = []
    for candidate, label in labels.items():
        row: dict[str, object] = {"optimizer": label}
        for name in data:
            more = [loss_of(line) - line["before"] for line in done.of(name, candidate)]
            row[name] = summary.spread(more) if more else "not yet"
        if any(value != "not yet" for value in [*row.values()][1:]):
            rows.append(row)
    return rows
