"""Launches that wait, so that one copy to the device serves all of them.

Within ``together`` those of several rules that are the same kernel over different parameters
become one launch, in the order of each rule. Elsewhere each pass is launched at once.
"""

import itertools
import threading
from collections.abc import Callable, Iterable

from ds_ext.ops.triton import tables
from ds_ext.ops.triton.tables import Launch


class _Waiting(threading.local):
    """Launches that wait, by rule, and the sums that are folded up after them."""

    def __init__(self) -> None:
        self.is_open = False
        self.rules: list[list[Launch]] = [[]]
        self.folds: list[Launch] = []

    def take(self) -> tuple[list[list[Launch]], list[Launch]]:
        """Takes out what waits -> the launches of each rule, what is folded up."""
        waiting = self.rules, self.folds
        self.rules, self.folds = [[]], []
        return waiting


_waiting = _Waiting()


class Together:
    """See ``together``; a generator would take some times as long, several times a step."""

    def __enter__(self) -> Callable[[], None]:
        _waiting.is_open = True
        return _next_rule

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        _waiting.is_open = False
        if failed is None:
            launch()
        else:
            _waiting.take()


def together() -> Together:
    """Collects passes, and launches them at the end; call what is given between two rules.

    What is collected has not run before: only passes that come later may read its results.
    """
    return Together()


def _next_rule() -> None:
    _waiting.rules.append([])


def ask(launches: Iterable[Launch], folds: Iterable[Launch] = ()) -> None:
    """Adds a pass to what waits, and what is to be folded up of its results."""
    _waiting.rules[-1].extend(launches)
    _waiting.folds.extend(x for x in folds if len(x.rows))
    if not _waiting.is_open:
        launch()


def launch() -> None:
    """Launches what waits: the first pass of each rule, the second of each, …, then folds."""
    if not _waiting.folds and not any(_waiting.rules):
        del _waiting.rules[1:]
        return
    rules, folds = _waiting.take()
    ordered: list[Launch] = []
    for some in itertools.zip_longest(*rules):
        ordered += tables.merged(x for x in some if x is not None)
    ordered += tables.merged(folds)
    by_device: dict[object, list[Launch]] = {}
    for one in ordered:
        by_device.setdefault(one.device, []).append(one)
    for alike in by_device.values():
        tables.run(alike)
