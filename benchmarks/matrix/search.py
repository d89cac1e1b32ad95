"""Chooses the next run: learning rates around the best one, then further seeds.

The order makes results useful at any time. On the first data set, each candidate runs at a likely
rate, then at a third and at three times this rate. While the best rate is at an edge, the next rate
beyond it follows. Then come candidates of later tiers, and the next data sets; then half and twice
the best rate; then more seeds at the best rate, and at the second best rate if chance may explain
the difference.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.matrix.lines import Lines, Point, best, loss_of, point_of, rates

FARTHEST = 1000.0  # the largest factor between the likely rate and a tried rate


def next_run(
    lines: Lines, starts: Sequence[Mapping[str, float]], data: Sequence[str], seeds: int
) -> Point | None:
    """Returns the next missing run, or None if all runs exist.

    Args:
        lines: the stored runs. A candidate with a failed run is skipped.
        starts: likely learning rates by candidate, 1 or 3 times a power of ten, in tiers.
        data: the data sets, in order.
        seeds: the number of seeds at the best rate.
    """
    done = {point_of(line) for line in lines.all}
    impossible = {line["candidate"] for line in lines.all if "error" in line}
    left = [{c: start for c, start in part.items() if c not in impossible} for part in starts]
    return next((point for point in _wanted(lines, left, data, seeds) if point not in done), None)


def _wanted(
    lines: Lines, starts: Sequence[Mapping[str, float]], data: Sequence[str], seeds: int
) -> Iterator[Point]:
    """Yields runs in order. Runs after the first missing one are guesses."""
    for name in data:
        for part in starts:
            yield from _bracketed(lines, part, data, name)
    pairs = [(name, candidate) for name in data for part in starts for candidate in part]
    for factor in (0.5, 2.0):
        for name, candidate in pairs:
            if found := _best_on_grid(lines, name, candidate):
                yield Point(name, candidate, rounded(found * factor), 0)
    for seed in range(1, seeds):
        for name, candidate in pairs:
            if found := best(lines.of(name, candidate, 0)):
                yield Point(name, candidate, found["lr"], seed)
    for name, candidate in pairs:
        if second := _in_doubt(lines, name, candidate, seeds):
            for seed in range(1, seeds):
                yield Point(name, candidate, second, seed)


def _in_doubt(lines: Lines, name: str, candidate: str, seeds: int) -> float | None:
    """The second best rate by the first seed, if its loss is below the best rate's mean loss."""
    first = sorted(lines.of(name, candidate, 0), key=loss_of)
    if len(first) < 2:
        return None
    best_lr, second_lr = (float(line["lr"]) for line in first[:2])
    own = [loss_of(line) for line in lines.of(name, candidate) if line["lr"] == best_lr]
    is_beaten = len(own) >= seeds and statistics.mean(own) > loss_of(first[1])
    return second_lr if is_beaten else None


def _bracketed(
    lines: Lines, starts: Mapping[str, float], data: Sequence[str], name: str
) -> Iterator[Point]:
    """Yields three rates around the first data set's best rate, then rates beyond an edge."""
    first = {c: _best_on_grid(lines, data[0], c) for c in starts} if name != data[0] else {}
    around = {c: first.get(c) or start for c, start in starts.items()}
    for away in (0, -1, 1):
        for candidate, start in around.items():
            yield Point(name, candidate, neighbour(start, away), 0)
    for candidate, start in starts.items():
        yield from _beyond(lines, name, candidate, start)


def _beyond(lines: Lines, name: str, candidate: str, start: float) -> Iterator[Point]:
    """Yields the rate beyond an edge of the tried rates if the best rate is at this edge."""
    own = lines.of(name, candidate, 0)
    if not (tried := [lr for lr in rates(own) if is_on_grid(lr)]):
        return
    found = best([line for line in own if is_on_grid(line["lr"])])
    lowest = found is None or found["lr"] == tried[0]
    highest = found is not None and found["lr"] == tried[-1]
    for at_edge, edge, away in ((lowest, tried[0], -1), (highest, tried[-1], 1)):
        lr = neighbour(edge, away)
        if at_edge and 1 / FARTHEST <= lr / start <= FARTHEST:
            yield Point(name, candidate, lr, 0)


def _best_on_grid(lines: Lines, name: str, candidate: str) -> float | None:
    """The best rate among 1 or 3 times powers of ten."""
    own = lines.of(name, candidate, 0)
    found = best([line for line in own if is_on_grid(line["lr"])])
    return found and float(found["lr"])


def neighbour(lr: float, away: int) -> float:
    """Returns the rate ``away`` places from ``lr`` in the series 1, 3, 10, 30, …"""
    return rounded((1.0, 3.0)[(place(lr) + away) % 2] * 10.0 ** ((place(lr) + away) // 2))


def place(lr: float) -> int:
    """Returns the index of a rate in the series 1, 3, 10, 30, …; that of 1 is 0."""
    return round(2 * math.log10(lr))


def is_on_grid(lr: float) -> bool:
    """Returns whether a rate is 1 or 3 times a power of ten."""
    return lr == neighbour(lr, 0)


def rounded(lr: float) -> float:
    """Returns a rate rounded to two digits, so that equal rates compare equal."""
    return float(f"{lr:.1e}")
