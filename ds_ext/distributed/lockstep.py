"""Lock-step rounds: the rules of many parameters advance together, with one reduction per round.

A rule's generator yields a tuple of partial sums and receives their totals over all ranks.
``lockstep`` merges many generators into one that yields flat tensors. ``run`` drives it with a real
reduction. ``simulate`` advances N merged generators, which are N ranks, in one process.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Sums: TypeAlias = tuple[Tensor, ...]
StepGenerator = Generator[tuple[Tensor, ...], tuple[Tensor, ...], None]
FlatSums = Generator[Tensor, Tensor, None]


class Generators(list[StepGenerator]):
    """The generators of a bucket's step, whose partial sums may be adjacent in memory.

    Args:
        contiguous_span: returns the flat tensor [n] that partial sums fill; None if they are not
            adjacent.
    """

    def __init__(self, contiguous_span: Callable[[Sequence[Tensor]], Tensor | None]) -> None:
        super().__init__()
        self.contiguous_span = contiguous_span


def lockstep(generators: Iterable[StepGenerator]) -> FlatSums:
    """Merges generators: yields all partial sums of a round, flat [n], and receives their totals.

    The sums of batches on a GPU are adjacent in memory, and are reduced in place.
    """
    waiting = _advance_all(generators)
    while waiting:
        partial = [x for _, sums in waiting for x in sums]
        flat = None
        if isinstance(generators, Generators):
            flat = generators.contiguous_span(partial)
        if flat is not None:  # the totals replace the sums
            total = yield flat
            if total is not flat:
                flat.copy_(total)
            waiting = _advance_all(generators, waiting)
            continue
        total = yield torch.cat([x.reshape(-1) for x in partial])
        answers = iter(total.split([x.numel() for _, sums in waiting for x in sums]))
        # If a parameter is fp64, the sums of the others are sent as fp64 too.
        answered = (
            (generator, tuple(next(answers).view(x.shape).to(x.dtype) for x in sums))
            for generator, sums in waiting
        )
        waiting = _advance_all(generators, answered)


def _advance_all(
    generators: Iterable[StepGenerator],
    answered: Iterable[tuple[StepGenerator, Sums | None]] | None = None,
) -> list[tuple[StepGenerator, Sums]]:
    """Begins all generators, or sends totals to those in ``answered``.

    Returns those that have not ended, with their next sums.
    """
    waiting = []
    for generator, totals in answered or ((generator, None) for generator in generators):
        sums = advance(generator, totals)
        if sums is not None:
            waiting.append((generator, sums))
    return waiting


def advance(generator: StepGenerator, totals: Sums | None) -> Sums | None:
    """Returns the next partial sums of a generator, None at its end; skips rounds without sums.

    Args:
        generator: the generator.
        totals: the totals of its last sums; None to begin it.
    """
    try:
        sums = next(generator) if totals is None else generator.send(totals)
        while not sums:
            sums = generator.send(())
        return sums
    except StopIteration:
        return None


def run(generators: Iterable[StepGenerator], all_reduce: Callable[[Tensor], None] | None) -> int:
    """Runs generators to their end, with one in-place ``all_reduce`` per round; returns the rounds.

    None means one rank: its partial sums are the totals, and are not copied. Each generator ends
    before the next one begins: the caches of a CPU then hold what its later passes read again.
    """
    if all_reduce is None:
        return max(map(_finish, generators), default=0)
    rounds = 0
    for flat in merged_rounds(lockstep(generators)):
        all_reduce(flat)
        rounds += 1
    return rounds


def _finish(generator: StepGenerator) -> int:
    """Runs the generator of one rank to its end; returns the rounds."""
    sums, rounds = advance(generator, None), 0
    while sums is not None:
        sums, rounds = advance(generator, sums), rounds + 1
    return rounds


def merged_rounds(merged: FlatSums) -> Iterable[Tensor]:
    """Yields the flat tensors of ``lockstep``, and sends each back as its own total."""
    try:
        flat = next(merged)
        while True:
            yield flat
            flat = merged.send(flat)
    except StopIteration:
        return


def simulate(ranks: Sequence[Iterable[StepGenerator]]) -> int:
    """Runs the generators of several ranks in one process, and returns the number of rounds."""
    rounds = 0
    for flats in zip(*(merged_rounds(lockstep(generators)) for generators in ranks), strict=True):
        total = torch.stack(flats).sum(0)
        for flat in flats:
            flat.copy_(total)
        rounds += 1
    return rounds
