"""Launches that wait, so that one copy to the device serves all of them.

Within ``deferred`` those of several rules become as few launches as their order allows: a rule's
passes come after those whose results they read, passes over the same elements are made by the same
programs, and all that may run side by side is one launch. Elsewhere each pass is launched at once.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ds_ext.ops.executors.triton import launches
from ds_ext.ops.executors.triton.launches import Chain, Launch


class Pass(NamedTuple):
    """A pass of a rule: launches over different parameters."""

    launches: list[Launch]
    only_sums: bool  # whether it writes nothing but sums, which no pass reads before they travel


class _Waiting(threading.local):
    """Passes that wait, by rule, and the sums that are folded up after them."""

    def __init__(self) -> None:
        self.is_open = False
        self.rules: list[list[Pass]] = [[]]
        self.folds: list[Launch] = []

    def take(self) -> tuple[list[list[Pass]], list[Launch]]:
        """Takes out what waits -> the passes of each rule, what is folded up."""
        waiting = self.rules, self.folds
        self.rules, self.folds = [[]], []
        return waiting


_waiting = _Waiting()


class Together:
    """See ``deferred``. A class, since ``@contextmanager`` is several times slower."""

    def __enter__(self) -> Callable[[], None]:
        _waiting.is_open = True
        return next_rule

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        _waiting.is_open = False
        if failed is None:
            launch()
        else:
            _waiting.take()


def deferred() -> Together:
    """Collects passes, and launches them at the end; call what is given between two rules.

    Collected passes have not run yet: only later passes may read their results.
    """
    return Together()


def next_rule() -> None:
    """Lets what is asked for next not wait for what was asked for before."""
    _waiting.rules.append([])


def ask(launches: Iterable[Launch], folds: Iterable[Launch] = (), only_sums: bool = False) -> None:
    """Adds a pass to what waits, and what is to be folded up of its results.

    Args:
        launches: the pass, over different parameters.
        folds: what adds up the partial sums that it leaves.
        only_sums: whether it writes nothing but these, and sums that travel.
    """
    found = list(launches)
    if found:
        _waiting.rules[-1].append(Pass(found, only_sums))
    _waiting.folds.extend(x for x in folds if len(x.rows))
    if not _waiting.is_open:
        launch()


def launch() -> None:
    """Launches what waits, and then folds."""
    if not _waiting.folds and not any(_waiting.rules):
        del _waiting.rules[1:]
        return
    rules, folds = _waiting.take()
    waves = _waves(rules)
    waves.append([[one] for one in folds])
    found = dict.fromkeys(one[0].memory.device for wave in waves for one in wave)
    for device in found:
        on_it = ([one for one in wave if one[0].memory.device == device] for wave in waves)
        launches.run([joint for wave in on_it for joint in launches.merged(wave)])


def _waves(rules: Sequence[Sequence[Pass]]) -> list[list[Chain]]:
    """What may run side by side, wave after wave: each rule's last pass is in the last."""
    leveled = [_levels(passes) for passes in rules if passes]
    count = max((len(levels) for levels in leveled), default=0)
    waves: list[list[Chain]] = [[] for _ in range(count)]
    for levels in leveled:
        for wave, chains in zip(waves[count - len(levels) :], levels, strict=True):
            wave += chains
    return waves


def _levels(passes: Sequence[Pass]) -> Sequence[Sequence[Chain]]:
    """A rule's passes, each in a chain with the one before or as soon as its order allows.

    Sums are read by nobody and change nothing: they may run beside each other, and whatever writes
    comes after all before it.
    """
    levels: list[list[list[Launch]]] = []
    written = 0  # levels up to the last that writes
    last: list[list[Launch]] = []
    for one in passes:
        # what changes something waits for all that may read it
        may_follow = one.only_sums or (levels and len(levels[-1]) == len(last))
        if may_follow and last and _are_over(last, one.launches):
            for chain, launch in zip(last, one.launches, strict=True):
                chain.append(launch)
            if not one.only_sums:
                written = len(levels)
            continue
        last = [[launch] for launch in one.launches]
        level = written if one.only_sums else len(levels)
        if level == len(levels):
            levels.append([])
        levels[level] += last
        if not one.only_sums:
            written = len(levels)
    return levels


def _are_over(chains: Sequence[Chain], launches: Sequence[Launch]) -> bool:
    """Whether passes are over the same elements, launch by launch."""
    if len(chains) != len(launches):
        return False
    return all(a[-1].is_over(b) for a, b in zip(chains, launches, strict=True))
