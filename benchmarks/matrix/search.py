"""Which run comes next: learning rates around the best, then more seeds.

Work is in an order in which any beginning of it is of use: on one data set all candidates at a
likely rate, then at a third and three times of it, then beyond while the best lies at an edge; then
the same for candidates that are less asked for, and on the next data set; then half and twice the
best; then the best with more seeds, and the second best too where chance may have made it second.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.matrix.lines import Lines, Point, best, loss_of, point_of, rates

FARTHEST = 1000.0  # times the likely rate, or a part of it: no rate beyond is tried


def next_run(
    lines: Lines, starts: Sequence[Mapping[str, float]], data: Sequence[str], seeds: int
) -> Point | None:
    """Returns the next run that is not done, None if all are.

    Args:
        lines: the runs that are done; those of a candidate that could not run end its part.
        starts: candidate -> likely learning rate, 1 or 3 times a power of ten; first those that
            are asked for most.
        data: the data sets, in the order in which they are taken.
        seeds: how many seeds the best rate gets.
    """
    done = {point_of(line) for line in lines.all}
    impossible = {line["candidate"] for line in lines.all if "error" in line}
    left = [{c: start for c, start in part.items() if c not in impossible} for part in starts]
    return next((point for point in _wanted(lines, left, data, seeds) if point not in done), None)


def _wanted(
    lines: Lines, starts: Sequence[Mapping[str, float]], data: Sequence[str], seeds: int
) -> Iterator[Point]:
    """Runs in the order in which they are wanted; those beyond one that is not done are guesses."""
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
    """The second best rate with the first seed, if its loss is less than the best's mean loss."""
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
    """Three rates on a data set, then those beyond; from the best on the first data set."""
    first = {c: _best_on_grid(lines, data[0], c) for c in starts} if name != data[0] else {}
    around = {c: first.get(c) or start for c, start in starts.items()}
    for away in (0, -1, 1):
        for candidate, start in around.items():
            yield Point(name, candidate, neighbour(start, away), 0)
    for candidate, start in starts.items():
        yield from _beyond(lines, name, candidate, start)


def _beyond(lines: Lines, name: str, candidate: str, start: float) -> Iterator[Point]:
    """The rate beyond the edge at which the best lies, if it does."""
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
    """The best rate of those that are 1 or 3 times a power of ten."""
    own = lines.of(name, candidate, 0)
    found = best([line for line in own if is_on_grid(line["lr"])])
    return found and float(found["lr"])


def neighbour(lr: float, away: int) -> float:
    """Returns the rate so many places away from ``lr`` among 1, 3, 10, 30, …"""
    return rounded((1.0, 3.0)[(place(lr) + away) % 2] * 10.0 ** ((place(lr) + away) // 2))


def place(lr: float) -> int:
    """Returns the place of a rate among 1, 3, 10, 30, …: that of 1 is 0."""
    return round(2 * math.log10(lr))


def is_on_grid(lr: float) -> bool:
    """Returns whether a rate is 1 or 3 times a power of ten."""
    return lr == neighbour(lr, 0)


def rounded(lr: float) -> float:
    """Returns a rate with two digits, so that equal rates are equal numbers."""
    return float(f"{lr:.1e}")
