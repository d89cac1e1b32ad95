"""A queue of launches, whose tables it copies to the device in one transfer.

A ``LaunchQueue`` merges the passes of a bucket's rules into as few launches as their order allows:
a rule's passes come after those whose results they read, the same programs make passes over the
same elements, and all passes that may run at the same time are one launch.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds_ext.ops.executors.triton import launches
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.executors.triton.launches import Chain, Launch


class QueuedPass(NamedTuple):
    """A pass of a rule: launches over different parameters."""

    launches: list[Launch]
    only_sums: bool  # whether it only writes sums, which no pass reads before they are reduced


class LaunchQueue:
    """The passes of a bucket's step on a GPU that have not been launched, and their memory.

    Only later passes may read the results of a pass before ``launch``.

    Args:
        memory: where launches allocate tables, partial sums and results.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._sequences: list[list[QueuedPass]] = [[]]
        self._folds: list[Launch] = []

    def begin_sequence(self) -> None:
        """Begins a sequence of passes that do not read results of the passes queued so far."""
        if self._sequences[-1]:
            self._sequences.append([])

    def add(
        self, launches: Iterable[Launch], folds: Iterable[Launch] = (), only_sums: bool = False
    ) -> None:
        """Adds a pass to the current sequence, and the launches that add up its partial sums.

        Args:
            launches: the pass, over different parameters.
            folds: launches that run last: they add up partial sums, or read nothing of this step.
            only_sums: whether the pass writes only partial sums, and sums that ranks reduce, which
                no pass reads before ``launch``.
        """
        found = list(launches)
        if found:
            self._sequences[-1].append(QueuedPass(found, only_sums))
        self._folds.extend(x for x in folds if len(x.rows))

    def launch(self) -> None:
        """Launches the passes, and then the folds."""
        rules, folds = self._sequences, self._folds
        self._sequences, self._folds = [[]], []
        waves = _waves(rules)
        waves.append([[one] for one in folds])
        if joints := [joint for wave in waves for joint in launches.merge_launches(wave)]:
            launches.launch_all(joints, self.memory)


def _waves(rules: Sequence[Sequence[QueuedPass]]) -> list[list[Chain]]:
    """Waves of chains that may run in parallel; each rule's last pass is in the last wave."""
    leveled = [_levels(passes) for passes in rules if passes]
    count = max((len(levels) for levels in leveled), default=0)
    waves: list[list[Chain]] = [[] for _ in range(count)]
    for levels in leveled:
        for wave, chains in zip(waves[count - len(levels) :], levels, strict=True):
            wave += chains
    return waves


def _levels(passes: Sequence[QueuedPass]) -> Sequence[Sequence[Chain]]:
    """The levels of a sequence of passes; the passes of one level may run at the same time.

    A pass over the same elements as the pass before extends that pass's chain. Otherwise a pass
    that only writes sums goes into the level after the last writer, any other into a new level.
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
