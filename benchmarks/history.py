"""Time of each optimizer's step by commit, relative to torch's SGD in the same round.

Each run adds a line to OUT/history.jsonl, and makes a page and its plot of all lines.
Ratios of different machines are comparable only roughly, so each line names its machine.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import report, step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = "1024x1024"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=step.SIZES, default=SIZE)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the history")


def main(args: argparse.Namespace) -> None:
    """Measures the current commit, and writes the history."""
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "history.jsonl"
    line = {**commit(), "machine": report.machine()}
    with path.open("a") as file:
        file.write(json.dumps(line | {"ratios": measured(args.size, args.rounds)}) + "\n")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    text = TEXT.format(unit=step.PLAIN, size=args.size)
    tables = {dtype: [row(line, dtype) for line in reversed(lines)] for dtype in ("fp32", "bf16")}
    tables["Machines"] = [{k: line[k] for k in ("commit", "machine")} for line in reversed(lines)]
    report.write(
        "history",
        "Time of a step by commit",
        text,
        tables,
        lambda f: draw(f, lines),
        folder=args.out,
    )


TEXT = """
Median over rounds of the time of a step relative to that of {unit}, for one parameter of {size}
and one thread, newest commit first. Weights in bf16 are rounded stochastically.
"""


def commit() -> dict[str, str]:
    """Returns the hash and the date of the commit that is checked out."""
    git = ["git", "log", "-1", "--format=%h %cs"]
    told = subprocess.check_output(git, cwd=Path(__file__).parent, text=True).split()
    return dict(zip(("commit", "date"), told, strict=True))


def measured(size: str, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median ratio of each optimizer, by dtype."""
    cpu, found = torch.device("cpu"), {}
    for dtype in ("fp32", "bf16"):
        made = step.candidates(dtype, cpu, (*step.OURS, step.PLAIN, step.ADAMW))
        able = {name: make for name, make in made.items() if not name.endswith(", nearest")}
        case = step.Case(step.SIZES[size], dtype, cpu)
        times = step.measure(case, able, rounds, time.thread_time)
        ratios = report.ratios(times, step.PLAIN)
        found[dtype] = {
            name.partition(",")[0]: round(ratio, 3)
            for name, (ratio, _) in ratios.items()
            if name not in (step.UNIT, step.PLAIN)
        }
    return found


def row(line: dict[str, Any], dtype: str) -> dict[str, object]:
    """Returns the row of a commit."""
    own = {name.removeprefix("ds_ext."): ratio for name, ratio in line["ratios"][dtype].items()}
    return {"commit": line["commit"], "date": line["date"]} | own


def draw(figure: "Figure", lines: list[dict[str, Any]]) -> None:
    """Draws a line for each optimizer in a panel for each dtype."""
    for axes, dtype in zip(figure.subplots(1, 2), ("fp32", "bf16"), strict=True):
        for name in lines[-1]["ratios"][dtype]:
            axes.plot([line["ratios"][dtype].get(name) for line in lines], ".-", label=name)
        axes.set_xticks(range(len(lines)), [line["commit"] for line in lines], rotation=90)
        axes.set_title(f"{dtype}, relative to {step.PLAIN}", fontsize=9)
        axes.set_yscale("log")
    axes.legend(fontsize=5)
