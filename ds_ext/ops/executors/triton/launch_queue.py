"""A queue of launches, so that one copy to the device brings the tables of all of them.

Within ``deferred``, passes of several rules become as few launches as their order allows. A pass
runs after the passes whose results it reads. Programs make all passes over their elements. Passes
that may run in parallel share a launch. Elsewhere, each pass is launched at once.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ds_ext.ops.executors.triton import launches
from ds_ext.ops.executors.triton.launches import Chain, Launch


class Pass(NamedTuple):
    """A pass of a rule: launches over different parameters."""

    launches: list[Launch]
    only_sums: bool  # whether it only writes sums, which no pass reads before their all-reduce


class _Waiting(threading.local):
    """The queued passes by rule, and the launches that reduce their partial sums."""

    def __init__(self) -> None:
        self.is_open = False
        self.rules: list[list[Pass]] = [[]]
        self.folds: list[Launch] = []

    def take(self) -> tuple[list[list[Pass]], list[Launch]]:
        """Empties the queue; returns the passes of each rule, and the reductions."""
        waiting = self.rules, self.folds
        self.rules, self.folds = [[]], []
        return waiting


_waiting = _Waiting()


class Together:
    """See ``deferred``. A class, because ``@contextmanager`` is several times slower."""

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
    """Queues passes and launches them on exit; yields ``next_rule``, to call between two rules.

    Queued passes have not run yet: only later passes may read their results.
    """
    return Together()


def next_rule() -> None:
    """Starts a new rule: later passes do not wait for earlier ones."""
    _waiting.rules.append([])


def ask(launches: Iterable[Launch], folds: Iterable[Launch] = (), only_sums: bool = False) -> None:
    """Queues a pass and the reductions of its partial sums; launches them unless in ``deferred``.

    Args:
        launches: the pass, over different parameters.
        folds: the launches that reduce its partial sums.
        only_sums: whether it only writes partial sums, and sums for an all-reduce.
    """
    found = list(launches)
    if found:
        _waiting.rules[-1].append(Pass(found, only_sums))
    _waiting.folds.extend(x for x in folds if len(x.rows))
    if not _waiting.is_open:
        launch()


def launch() -> None:
    """Launches all queued passes, then the reductions of their partial sums."""
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
    """Waves of chains that may run in parallel; each rule's last pass is in the last wave."""
    leveled = [_levels(passes) for passes in rules if passes]
    count = max((len(levels) for levels in leveled), default=0)
    waves: list[list[Chain]] = [[] for _ in range(count)]
    for levels in leveled:
        for wave, chains in zip(waves[count - len(levels) :], levels, strict=True):
            wave += chains
    return waves


def _levels(passes: Sequence[Pass]) -> Sequence[Sequence[Chain]]:
    """Levels of a rule's passes: each pass joins the chain before it, or the first level it may.

    Passes that only write sums may run in parallel, because no pass reads these sums. A pass that
    writes anything else runs after all earlier passes.
    """
    levels: list[list[list[Launch]]] = []
    written = 0  # the number of levels up to the last one that writes
    last: list[list[Launch]] = []
    for one in passes:
        # a pass that writes must wait for every pass that may read
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
    """Whether passes cover the same elements, launch by launch."""
    if len(chains) != len(launches):
        return False
    return all(a[-1].is_over(b) for a, b in zip(chains, launches, strict=True))
