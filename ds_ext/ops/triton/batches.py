"""Requests that wait, and are then launched together.

Within ``together`` those of several rules that are the same kernel over different parameters
become one launch, in the order of each rule. Elsewhere each is launched at once.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ds_ext.ops.triton import tables
from ds_ext.ops.triton.request import Request

TOGETHER = 1024  # parameters of a launch at most: each program looks for its own among them


class Batch(threading.local):
    """Requests that wait, by rule, and the sums that are folded up after them."""

    def __init__(self) -> None:
        self.is_open = False
        self.rules: list[list[Request]] = [[]]
        self.folds: list[Request] = []

    def take(self) -> tuple[list[list[Request]], list[Request]]:
        """Takes out what waits -> the requests of each rule, what is folded up."""
        waiting = self.rules, self.folds
        self.rules, self.folds = [[]], []
        return waiting


_batch = Batch()


@contextlib.contextmanager
def together() -> Iterator[Callable[[], None]]:
    """Collects passes, and launches them at the end; call what is yielded between two rules.

    What is collected has not run before: only passes that come later may read its results.
    """
    _batch.is_open = True
    try:
        yield lambda: _batch.rules.append([])
    except BaseException:
        _batch.take()
        raise
    finally:
        _batch.is_open = False
    launch()


def ask(request: Request, folds: Sequence[Request] = ()) -> None:
    """Adds a request to those that wait, and what is to be folded up of its results."""
    if not request.programs:
        return
    _batch.rules[-1].append(request)
    _batch.folds.extend(folds)
    if not _batch.is_open:
        launch()


def launch() -> None:
    """Launches what waits: the first request of each rule, the second of each, …, then folds."""
    rules, folds = _batch.take()
    for requests in itertools.zip_longest(*rules):
        _run(request for request in requests if request is not None)
    _run(folds)


def _run(requests: Iterable[Request]) -> None:
    """Launches requests that do not depend on each other, those that are alike as one."""
    alike: dict[tuple[Any, ...], list[Request]] = {}
    for request in requests:
        kind = request.device, request.kernel, request.constants, request.is_aligned
        alike.setdefault(kind, []).append(request)
    for group in alike.values():
        for first in range(0, len(group), TOGETHER):
            tables.run(group[first : first + TOGETHER])
