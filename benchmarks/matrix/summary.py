"""Tables of stored runs: each candidate's best learning rate and result."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.matrix.lines import Line, Lines, best, loss_of, rates

NEAR = 0.02  # losses within 2 % of the best are near it


@dataclass(frozen=True)
class Best:
    """A candidate's result on a data set at its best learning rate."""

    lr: float
    tried: list[float]  # rates with at least one seed
    of_seed: dict[int, float]  # losses
    accuracies: list[float]
    near: list[float]  # rates whose loss is near the best, with the first seed

    @property
    def losses(self) -> list[float]:
        """The loss of each seed."""
        return list(self.of_seed.values())

    @property
    def is_at_edge(self) -> bool:
        """Whether the best rate is the lowest or highest tried rate, and so no optimum."""
        return self.lr in (self.tried[0], self.tried[-1])


def best_of(lines: Lines, data: str, candidate: str) -> Best | None:
    """Returns the result at the best rate: the lowest mean among rates with the most seeds."""
    own = lines.of(data, candidate)
    first = [line for line in own if line["seed"] == 0]
    found = best(first)
    if found is None:
        return None
    runs = [[line for line in own if line["lr"] == lr] for lr in rates(first)]
    at_best = min(runs, key=lambda some: (-len(some), statistics.mean(map(loss_of, some))))
    least = loss_of(found)
    return Best(
        at_best[0]["lr"],
        rates(first),
        {line["seed"]: loss_of(line) for line in at_best},
        [line["accuracy"] for line in at_best],
        rates(line for line in first if loss_of(line) <= least * (1 + NEAR)),
    )


def given_up(lines: Lines, data: Sequence[str], candidate: str) -> dict[float, float]:
    """Returns the share of fine-tuning's gain that each rate loses, in the worst data set.

    For a data set the share is (loss - best loss) / (loss before - best loss), with the first seed.
    The result contains only rates that were tried on every data set on which the candidate has
    runs.
    """
    shares: dict[float, list[float]] = {}
    there = [own for name in data if best(own := lines.of(name, candidate, 0)) is not None]
    for own in there:
        least = min(map(loss_of, own))
        for line in own:
            share = (loss_of(line) - least) / (line["before"] - least)
            shares.setdefault(line["lr"], []).append(share)
    return {lr: max(some) for lr, some in sorted(shares.items()) if len(some) == len(there)}


def spread(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Returns mean, standard deviation and count: "1.234 ± 0.005 (n = 3)"."""
    mean = statistics.mean(values)
    around = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:{sign}.{digits}f}{around} (n = {len(values)})"


def of_data(
    lines: Lines, data: str, labels: Mapping[str, str], unit: str, with_answers: bool = True
) -> list[dict[str, object]]:
    """Returns a data set's table, best first.

    Args:
        lines: the stored runs.
        data: the data set.
        labels: the label of each candidate in the table.
        unit: the candidate with which losses are compared.
        with_answers: whether rows have answers that are right or wrong as a whole.
    """
    found = {c: b for c in labels if (b := best_of(lines, data, c)) is not None}
    against, rows = best_of(lines, data, unit), []
    for candidate, own in sorted(found.items(), key=lambda item: statistics.mean(item[1].losses)):
        edge = " (edge of the rates tried)" if own.is_at_edge else ""
        row: dict[str, object] = {
            "optimizer": labels[candidate],
            "best learning rate": f"{own.lr:g}{edge}",
            "held-out loss": spread(own.losses),
            f"loss less that of {labels.get(unit, unit)}": less(own, against),
        }
        if with_answers:
            percent = [100 * accuracy for accuracy in own.accuracies]
            row["answers wholly right, %"] = spread(percent, 1)
        row["rates tried"] = f"{len(own.tried)}, {own.tried[0]:g} to {own.tried[-1]:g}"
        row["within 2 % of the best"] = f"{own.near[0]:g} to {own.near[-1]:g}"
        rows.append(row)
    return rows


def less(own: Best, unit: Best | None) -> str:
    """Returns the differences of losses from those of ``unit`` with the same seed and batches."""
    if unit is None:
        return "not yet"
    common = [seed for seed in own.of_seed if seed in unit.of_seed]
    return spread([own.of_seed[seed] - unit.of_seed[seed] for seed in common], sign="+")


def overall(
    lines: Lines, data: Sequence[str], labels: Mapping[str, str]
) -> list[dict[str, object]]:
    """Returns best rates and losses of all data sets side by side, in the order of ``labels``."""
    rows = []
    for candidate, label in labels.items():
        row: dict[str, object] = {"optimizer": label}
        for name in data:
            own = best_of(lines, name, candidate)
            row[name] = "not yet" if own is None else f"{spread(own.losses)} at {own.lr:g}"
        if any(cell != "not yet" for name, cell in row.items() if name != "optimizer"):
            rows.append(row)
    return rows


def failed(lines: Lines, labels: Mapping[str, str]) -> list[str]:
    """Returns sentences about candidates that failed and runs that diverged."""

    def name(line: Line) -> str:
        return labels.get(line["candidate"], line["candidate"])

    errors = {name(line): line["error"] for line in lines.all if "error" in line}
    told = [f"{label} did not run: {error}" for label, error in errors.items()]
    gone = [x for x in lines.all if "error" not in x and not math.isfinite(loss_of(x))]
    named = [f"{name(x)} at {x['lr']:g} ({x['data']})" for x in gone]
    return told + ([f"Diverged: {', '.join(named)}."] if named else [])


def machines(lines: Sequence[Line]) -> list[str]:
    """Returns the different machines, versions and dates in the lines."""
    return list(dict.fromkeys(line["machine"] for line in lines))
