"""Lock-step rounds: the rules of many parameters advance together, one reduction a round.

A rule yields a tuple of partial sums and is sent back their totals over all ranks. ``lockstep``
merges many rules into one generator of flat tensors; ``run`` drives it with a real reduction, and
N merged generators advanced side by side are N ranks simulated in one process (``simulate``).
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.executors.triton import memory
from ds_ext.ops.executors.triton.waiting import together

Sums: TypeAlias = tuple[Tensor, ...]
StepGenerator = Generator[tuple[Tensor, ...], tuple[Tensor, ...], None]
FlatSums = Generator[Tensor, Tensor, None]


def lockstep(rules: Iterable[StepGenerator]) -> FlatSums:
    """Merges rules into one: yields all partial sums of a round, flat [n], takes their totals.

    Those of batches on a GPU lie side by side as it is, and are added up where they are.
    """
    waiting = _advance_all((rule, None) for rule in rules)
    while waiting:
        partial = [x for _, sums in waiting for x in sums]
        flat = memory.joined(partial)
        if flat is not None:  # the sums are the totals, once these are there
            total = yield flat
            if total is not flat:
                flat.copy_(total)
            waiting = _advance_all(waiting)
            continue
        total = yield torch.cat([x.reshape(-1) for x in partial])
        answers = iter(total.split([x.numel() for _, sums in waiting for x in sums]))
        # Where a parameter is fp64, sums of others travel as fp64 too.
        waiting = _advance_all(
            (rule, tuple(next(answers).view(x.shape).to(x.dtype) for x in sums))
            for rule, sums in waiting
        )


def _advance_all(
    answered: Iterable[tuple[StepGenerator, Sums | None]],
) -> list[tuple[StepGenerator, Sums]]:
    """Sends each rule its totals -> those that have not ended, and what they ask for next."""
    waiting = []
    with together() as next_rule:
        for rule, totals in answered:
            sums = _advance(rule, totals)
            next_rule()
            if sums is not None:
                waiting.append((rule, sums))
    return waiting


def _advance(rule: StepGenerator, totals: Sums | None) -> Sums | None:
    """The next partial sums of a rule, None at its end. Asking for nothing takes no round."""
    try:
        sums = next(rule) if totals is None else rule.send(totals)
        while not sums:
            sums = rule.send(())
        return sums
    except StopIteration:
        return None


def run(rules: Iterable[StepGenerator], all_reduce: Callable[[Tensor], None] | None) -> int:
    """Runs rules to their end, ``all_reduce`` summing in place once a round; -> rounds taken.

    With None there is one rank: partial sums are the totals, and are not copied.
    """
    if all_reduce is None:
        return _run_alone(rules)
    merged, rounds = lockstep(rules), 0
    for flat in merged_rounds(merged):
        all_reduce(flat)
        rounds += 1
    return rounds


def _run_alone(rules: Iterable[StepGenerator]) -> int:
    """Runs rules to their end, sending each its own partial sums; -> rounds taken."""
    rounds = 0
    waiting = _advance_all((rule, None) for rule in rules)
    while waiting:
        rounds += 1
        waiting = _advance_all(waiting)
    return rounds


def merged_rounds(merged: FlatSums) -> Iterable[Tensor]:
    """Iterates over the flat tensors of ``lockstep``; each goes back as its own total."""
    try:
        flat = next(merged)
        while True:
            yield flat
            flat = merged.send(flat)
    except StopIteration:
        return


def simulate(ranks: Sequence[Iterable[StepGenerator]]) -> int:
    """Runs the rules of several ranks in one process, adding up what they yield; -> rounds."""
    rounds = 0
    for flats in zip(*(merged_rounds(lockstep(rules)) for rules in ranks), strict=True):
        total = torch.stack(flats).sum(0)
        for flat in flats:
            flat.copy_(total)
        rounds += 1
    return rounds
