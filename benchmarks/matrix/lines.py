"""Stored runs: one line of JSON per run, in a file per data set."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]


class Point(NamedTuple):
    """Identifies one run of a matrix."""

    data: str
    candidate: str
    lr: float
    seed: int


def point_of(line: Line) -> Point:
    """Returns the run that a line belongs to."""
    return Point(line["data"], line["candidate"], line["lr"], line["seed"])


def loss_of(line: Line) -> float:
    """Returns a run's held-out loss; infinity if the run diverged or failed."""
    loss = line.get("loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf


class Lines:
    """The stored runs in a folder that have the same setup.

    Args:
        folder: has DATA.jsonl for each data set. The first added line creates it.
        setup: the settings that all runs share, such as {"steps": 40}. Other lines are ignored.
    """

    def __init__(self, folder: Path, setup: Line) -> None:
        self.folder, self.setup = folder, setup
        self.all: list[Line] = []
        for path in sorted(folder.glob("*.jsonl")):
            self.all += [line for line in read(path) if setup.items() <= line.items()]

    def add(self, line: Line) -> None:
        """Appends a run to its file and flushes the file."""
        line = self.setup | line
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{line['data']}.jsonl").open("a") as file:
            file.write(json.dumps(_plain(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.all.append(line)

    def of(self, data: str, candidate: str, seed: int | None = None) -> list[Line]:
        """Returns the runs of a candidate on a data set, in the order in which they were made."""
        wanted = (data, candidate)
        found = (line for line in self.all if (line["data"], line["candidate"]) == wanted)
        return [line for line in found if seed is None or line["seed"] == seed]


def read(path: Path) -> list[Line]:
    """Returns the lines of a file. Ignores a line that was only partly written."""
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def best(lines: Sequence[Line]) -> Line | None:
    """Returns the run with the lowest held-out loss; None if no loss is finite."""
    finite = [line for line in lines if math.isfinite(loss_of(line))]
    return min(finite, key=loss_of, default=None)


def rates(lines: Iterable[Line]) -> list[float]:
    """Returns the different learning rates of runs, in order."""
    return sorted({line["lr"] for line in lines})


def _plain(line: Line) -> Line:
    """The line with null instead of NaN and infinity, which JSON does not support."""
    bad = (k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v))
    return line | dict.fromkeys(bad)
