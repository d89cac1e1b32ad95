"""Lock-step rounds: the rules of many parameters advance together, with one reduction per round.

A rule's generator yields a tuple of partial sums and receives their totals over all ranks, or it
yields a ``Joint`` and receives its results. ``lockstep`` merges many generators into one that
yields flat tensors. ``run`` drives it with a real reduction. ``simulate`` advances N merged
generators, which are N ranks, in one process.
"""

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops import joint
from ds_ext.ops.joint import Joint

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
    waiting = _advance_all((generator, None) for generator in generators)
    while waiting:
        partial = [x for _, sums in waiting for x in sums]
        flat = None
        if isinstance(generators, Generators):
            flat = generators.contiguous_span(partial)
        if flat is not None:  # the totals replace the sums
            total = yield flat
            if total is not flat:
                flat.copy_(total)
            waiting = _advance_all(waiting)
            continue
        total = yield torch.cat([x.reshape(-1) for x in partial])
        answered, start = list[tuple[StepGenerator, Sums]](), 0
        for generator, sums in waiting:
            totals = []
            for x in sums:  # if a parameter is fp64, the sums of the others are sent as fp64 too
                start, first = start + x.numel(), start
                totals.append(total[first:start].view(x.shape).to(x.dtype))
            answered.append((generator, tuple(totals)))
        waiting = _advance_all(answered)


def _advance_all(
    answered: Iterable[tuple[StepGenerator, Sums | None]],
) -> list[tuple[StepGenerator, Sums]]:
    """Sends totals to generators, or begins those that have None.

    Returns those that have not ended, with their next sums.
    """
    found: dict[int, tuple[StepGenerator, Sums]] = {}

    def keep(i: int, generator: StepGenerator, sums: Sums) -> None:
        found[i] = generator, sums

    _advance_jointly(answered, keep)
    return [found[i] for i in sorted(found)]


def _advance_jointly(
    answered: Iterable[tuple[StepGenerator, Sums | None]],
    receive: Callable[[int, StepGenerator, Sums], Sums | None],
) -> None:
    """Begins generators, or sends them totals; answers their joint operations together.

    A generator with a joint operation waits until enough others wait for the same one, or until all
    others have been advanced.

    Args:
        answered: the generators, with the totals of their last sums; None to begin one.
        receive: is called with the position of a generator, the generator and its next sums.
            Returns their totals, to advance it further, or None.
    """
    waiting: dict[Hashable, list[tuple[int, StepGenerator, Joint]]] = {}

    def advance_one(i: int, generator: StepGenerator, totals: Sums | None) -> None:
        sums = _next(generator, totals)
        while sums is not None and not isinstance(sums, Joint):
            totals = receive(i, generator, sums)
            sums = None if totals is None else _next(generator, totals)
        if sums is not None:
            key = sums.key
            alike = waiting.setdefault(key, [])
            alike.append((i, generator, sums))
            if len(alike) >= sums.most:
                answer(key)

    def answer(key: Hashable) -> None:
        alike = waiting.pop(key)
        results = joint.answers([asked for *_, asked in alike])
        for (i, generator, _), result in zip(alike, results, strict=True):
            advance_one(i, generator, result)

    for i, (generator, totals) in enumerate(answered):
        advance_one(i, generator, totals)
    while waiting:
        answer(next(iter(waiting)))


def _next(generator: StepGenerator, totals: Sums | None) -> Sums | None:
    """What a generator yields next, None at its end; skips rounds without sums."""
    try:
        sums = _checked(next(generator) if totals is None else generator.send(totals))
        while not sums:
            sums = _checked(generator.send(()))
        return sums
    except StopIteration:
        return None


def advance(generator: StepGenerator, totals: Sums | None) -> Sums | None:
    """Returns the next partial sums of a generator, None at its end; skips rounds without sums.

    Args:
        generator: the generator.
        totals: the totals of its last sums; None to begin it.
    """
    found: list[Sums] = []
    _advance_jointly([(generator, totals)], lambda i, generator, sums: found.append(sums))
    return found[0] if found else None


def _checked(sums: Any) -> Sums:
    """What a generator has yielded; TypeError if it is no tuple, as a user's rule may yield."""
    if not isinstance(sums, tuple):
        raise TypeError(
            f"a rule's step yields a {type(sums).__name__}; allowed: a tuple of partial sums, such "
            "as (ops.square_sum(g, shard, g),)."
        )
    return sums


def run(generators: Iterable[StepGenerator], all_reduce: Callable[[Tensor], None] | None) -> int:
    """Runs generators to their end, with one in-place ``all_reduce`` per round; returns the rounds.

    None means one rank: its partial sums are the totals, and are not copied. Each generator ends
    before the next one begins, except while it waits for a joint operation: the caches of a CPU
    then hold what its later passes read again.
    """
    if all_reduce is None:
        counts = Counter[int]()

        def reply(i: int, generator: StepGenerator, sums: Sums) -> Sums:
            counts[i] += 1
            return sums

        _advance_jointly(((generator, None) for generator in generators), reply)
        return max(counts.values(), default=0)
    rounds = 0
    for flat in merged_rounds(lockstep(generators)):
        all_reduce(flat)
        rounds += 1
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
    """Runs the generators of several ranks in one process, and returns the number of rounds.

    Raises:
        ValueError: ranks do not yield equally often, or not equally many sums.
    """
    rounds = 0
    for flats in zip(*(merged_rounds(lockstep(generators)) for generators in ranks), strict=True):
        if len({*map(len, flats)}) > 1:
            raise ValueError("ranks have yielded different numbers of sums")
        total = torch.stack(flats).sum(0)
        for flat in flats:
            flat.copy_(total)
        rounds += 1
    return rounds
