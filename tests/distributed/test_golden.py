"""Losses of 50 steps do not move: they equal those that tests/data/golden records."""

import itertools

import pytest
import torch

from ds_ext.rules import REGISTRY
from tests.tools import golden
from tests.tools.golden import DTYPES, STEPS, WAYS, values

# The largest difference between two losses, relative to the fall of the recorded ones: on another
# kind of CPU, and between one process and two ranks. Rounding to bf16, and rules that amplify
# differences in the last bits, need larger ones.
CLOSE = {"fp32": 1e-5, "bf16": 0.15}
FP32 = {"flashadamw": 5e-3, "scale": 1e-2, "sinkgd": 1e-2, "apollomini": 5e-2}
AGAIN = 25  # steps that are compared: projections are renewed in step 20


def tolerance(rule: str, dtype: str) -> float:
    return FP32.get(rule, CLOSE[dtype]) if dtype == "fp32" else CLOSE[dtype]


def error(losses: list[str], record: list[str]) -> float:
    """The largest difference to the first of the recorded losses, relative to the fall of all."""
    a, b = values(losses), values(record)
    return float(abs(a - b[: len(a)]).max() / (b.max() - b.min()))


def moved(machine: str, curves: golden.Curves, rule: str) -> list[str]:
    where, record = golden.recorded(rule)
    if where == machine:
        return [name for name, losses in curves.items() if losses != record[name][:AGAIN]]
    far = {name: error(losses, record[name]) for name, losses in curves.items()}
    return [
        f"{name}: {off:.1g}" for name, off in far.items() if off > tolerance(rule, name.split()[1])
    ]


@pytest.mark.slow
def test_losses_equal_the_record():
    here, found = golden.machine(), golden.measured(list(REGISTRY), AGAIN)
    wrong = {rule: names for rule, curves in found.items() if (names := moved(here, curves, rule))}
    assert not wrong, "if this is meant: `python -m tests.tools.golden`, and a line in CHANGELOG.md"


def test_every_optimizer_has_a_record_of_losses_that_fall_alike_on_two_ranks():
    assert {path.stem for path in golden.FOLDER.iterdir()} == {*REGISTRY}
    for rule in REGISTRY:
        _, record = golden.recorded(rule)
        assert list(record) == [f"{way} {dtype}" for way in WAYS for dtype in DTYPES]
        for losses in map(values, record.values()):
            assert len(losses) == STEPS and losses[-5:].mean() < losses[0] - 0.4
        for way, dtype in itertools.product(WAYS[1:], DTYPES):
            off = error(record[f"{way} {dtype}"], record[f"plain {dtype}"])
            assert off <= tolerance(rule, dtype), (rule, way, dtype)


def test_recorded_losses_of_adamw_equal_those_of_torchs_adamw():
    model = golden.llama("fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=golden.HYPERS["adamw"]["lr"])
    losses = []
    for rows in golden.batches():
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        losses.append(str(loss.detach().numpy()))
    assert error(losses, golden.recorded("adamw")[1]["plain fp32"]) <= 1e-4
