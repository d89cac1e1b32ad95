"""Questions and answers as tokens, for training and held out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
OWN = Path(__file__).parents[1] / "data"
DATA = {"sounds": OWN, "devil": ROOT / "examples" / "data", "films": OWN}  # folders by name
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # SmolLM2's, no system message
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One row: token ids. Those from ``asked`` on are labels."""

    ids: list[int]
    asked: int


def rows(name: str, part: str, tokenizer: Any, most: int) -> list[Row]:
    """Returns the rows of a data set.

    Args:
        name: a key of ``DATA``.
        part: "train" or "test".
        tokenizer: the model's tokenizer.
        most: the most tokens of a row. Longer rows are cut, and rows without labels are left out.
    """
    found = []
    for line in (DATA[name] / f"{name}_{part}.jsonl").read_text().splitlines():
        pair = json.loads(line)
        asked = tokenizer(ASKED.format(pair["instruction"]), add_special_tokens=False)["input_ids"]
        answer = pair["output"] + tokenizer.eos_token
        answered = tokenizer(answer, add_special_tokens=False)["input_ids"]
        if len(asked) < most:
            found.append(Row((asked + answered)[:most], len(asked)))
    if not found:
        raise SystemExit(f"--tokens {most}: no row of {name} has room for an answer; take more.")
    return found


def batch(chosen: list[Row]) -> Batch:
    """Returns rows as tensors [rows, longest], with the label -100 for ignored tokens."""
    longest = max(len(row.ids) for row in chosen)
    ids = torch.zeros(len(chosen), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(chosen):
        n = len(row.ids)
        ids[i, :n] = torch.tensor(row.ids)
        mask[i, :n] = 1
        labels[i, row.asked : n] = ids[i, row.asked : n]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(training: list[Row], size: int, steps: int, seed: int) -> list[Batch]:
    """Returns the batches of a run, equal for each candidate. ``seed`` sets the order of rows."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < size * steps:
        order += torch.randperm(len(training), generator=generator).tolist()
    chosen = [order[i * size : (i + 1) * size] for i in range(steps)]
    return [batch([training[i] for i in part]) for part in chosen]


def held_out(tests: list[Row], size: int = 16) -> list[Batch]:
    """Returns rows in batches of similar length, to reduce padding."""
    ordered = sorted(tests, key=lambda row: len(row.ids))
    return [batch(ordered[i : i + size]) for i in range(0, len(ordered), size)]
