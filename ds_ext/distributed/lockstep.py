"""Lock-step rounds: the rules of many parameters advance together, with one collective per round.

A rule's generator yields a tuple of partial sums and receives their totals over all ranks, or it
yields an ``Exchange`` or a ``Joint`` and receives its results. ``lockstep`` merges many generators
into one that yields flat tensors of sums, and ``Exchanges``. ``run`` drives it with real
collectives. ``simulate`` advances N merged generators, which are N ranks, in one process.
"""

import itertools
import re
from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ext.distributed.placement import Placement
from ds_ext.ops.exchange import Exchange, Exchanges
from ds_ext.ops.expressions import Sums
from ds_ext.ops.joint import Joint

_OF_TUPLES = re.compile("tuple|sequence|unpack")
_UNPACK = "yield returns a tuple, with a total for each sum: write (total,) = yield (x,)"
StepGenerator = Generator[Sums, Sums, None]


def lockstep(generators: Iterable[StepGenerator]) -> Iterator[Tensor | Exchanges]:
    """Merges generators: yields the partial sums of a round, flat [n], and its exchanges.

    Before it goes on, the caller replaces sums by their totals, and delivers exchanges.
    """
    waiting, _ = _advance_all(zip(generators, itertools.repeat(None), strict=False))
    while waiting:
        partial: list[Tensor] = []
        moved: list[Exchange] = []
        for _, sums in waiting:
            if isinstance(sums, Exchange):
                moved.append(sums)
            else:
                partial.extend(sums)
        parts: Iterator[Tensor] = iter(())
        if partial:
            try:
                flat = torch.cat([x.reshape(-1) for x in partial])
            except AttributeError:  # of a number
                kinds = sorted({type(x).__name__ for x in partial})
                raise TypeError(f"a rule's step yields {kinds}; allowed: tensors.") from None
            yield flat
            parts = iter(flat.split([x.numel() for x in partial]))
        delivered: Iterator[Tensor] = iter(())
        if moved:
            exchanges = Exchanges(moved)
            yield exchanges
            delivered = iter(exchanges.results)
        answered = list[tuple[StepGenerator, Sums]]()
        for generator, sums in waiting:
            if isinstance(sums, Exchange):
                answered.append((generator, (next(delivered),)))
                continue
            # If a parameter is fp64, the sums of the others are sent as fp64 too.
            totals = [next(parts).view(x.shape).to(x.dtype) for x in sums]
            answered.append((generator, tuple(totals)))
        waiting, _ = _advance_all(answered)


def _advance_all(
    answered: Iterable[tuple[StepGenerator, Sums | None]], is_alone: bool = False
) -> tuple[list[tuple[StepGenerator, Sums]], int]:
    """Begins generators, or sends them totals; answers their joint operations together.

    A generator with a joint operation waits until enough others wait for the same one, or until all
    others have been advanced. If the rank ``is_alone``, sums are their own totals. Returns the
    generators that wait for totals, with their sums, and the most rounds of a generator.
    """
    found: dict[int, tuple[StepGenerator, Sums]] = {}
    rounds = Counter[int]()
    waiting: dict[Hashable, tuple[int, list[tuple[int, StepGenerator, Joint]]]] = {}
    ready: list[tuple[int, StepGenerator, Sums | None]] = []  # the last one is advanced first
    others = ((i, *pair) for i, pair in enumerate(answered))
    while (first := ready.pop() if ready else next(others, None)) is not None or waiting:
        if first is None:
            ready = _answered(waiting.pop(next(iter(waiting)))[1])
            continue
        i, generator, totals = first
        sums = _next(generator, totals)
        if isinstance(sums, Joint):
            key = sums.key
            most, alike = waiting.get(key) or waiting.setdefault(key, (sums.most, []))
            alike.append((i, generator, sums))
            if len(alike) >= most:
                del waiting[key]
                ready += _answered(alike)
        elif sums is not None:
            rounds[i] += 1
            if is_alone:
                ready.append((i, generator, sums))
            else:
                found[i] = generator, sums
    return [found[i] for i in sorted(found)], max(rounds.values(), default=0)


def _answered(
    alike: list[tuple[int, StepGenerator, Joint]],
) -> list[tuple[int, StepGenerator, Sums | None]]:
    """Generators with the results of their joint operation; the first one is last."""
    joints = [asked for *_, asked in alike]
    results: Sequence[Sums | None] = joints[0].answers(joints)
    pairs = zip(reversed(alike), reversed(results), strict=True)
    return [(i, generator, result) for (i, generator, _), result in pairs]


def _next(generator: StepGenerator, totals: Sums | None) -> Sums | None:
    """What a generator yields next, None at its end; skips rounds without sums."""
    try:
        sums: Any = next(generator) if totals is None else generator.send(totals)
        while isinstance(sums, tuple) and not sums:
            sums = generator.send(())
    except StopIteration:
        return None
    except (TypeError, AttributeError, ValueError) as error:
        is_known = _UNPACK in str(error)  # the generator merges others
        if totals and not is_known and _OF_TUPLES.search(str(error)):
            raise TypeError(f"{error}. {_UNPACK}") from error
        raise
    if not isinstance(sums, tuple):
        raise TypeError(
            f"a rule's step yields a {type(sums).__name__}; allowed: a tuple of partial sums, such "
            "as (ops.square_sum(g, shard, g),)."
        )
    return sums


def advance(generator: StepGenerator, totals: Sums | None) -> Sums | None:
    """Returns the next partial sums of a generator, None at its end; skips rounds without sums.

    Args:
        generator: the generator.
        totals: the totals of its last sums; None to begin it.
    """
    waiting, _ = _advance_all([(generator, totals)])
    return waiting[0][1] if waiting else None


def run(generators: Iterable[StepGenerator], collectives: Placement | None) -> int:
    """Runs generators to their end, with one collective per round; returns the rounds.

    None means one rank: its partial sums are the totals, and are not copied. Each generator ends
    before the next one begins, except while it waits for a joint operation: the caches of a CPU
    then hold what its later passes read again.
    """
    if collectives is None:
        return _advance_all(zip(generators, itertools.repeat(None), strict=False), is_alone=True)[1]
    rounds = 0
    for message in lockstep(generators):
        if isinstance(message, Exchanges):
            collectives.exchange(message)
        else:
            collectives.all_reduce(message)
        rounds += 1
    return rounds


def simulate(ranks: Sequence[Iterable[StepGenerator]]) -> int:
    """Runs the generators of several ranks in one process, and returns the number of rounds.

    Raises:
        ValueError: ranks do not yield equally often, or not equally many sums.
    """
    rounds = 0
    for messages in zip(*map(lockstep, ranks), strict=True):
        combine(messages)
        rounds += 1
    return rounds


def combine(messages: Sequence[Any]) -> None:
    """Does a collective of simulated ranks, each of which has yielded a message of ``lockstep``.

    Raises:
        ValueError: the ranks have yielded different messages.
    """
    if len({*map(type, messages)}) > 1:
        raise ValueError("some ranks have yielded sums, and others an exchange")
    if isinstance(messages[0], Exchanges):
        sent = [flat.split(sizes) for flat, sizes, _ in (x.packed(len(messages)) for x in messages)]
        for message, parts in zip(messages, zip(*sent, strict=True), strict=True):
            message.deliver(parts)
        return
    if len({*map(len, messages)}) > 1:
        raise ValueError("ranks have yielded different numbers of sums")
    total = torch.stack([*messages]).sum(0)
    for flat in messages:
        flat.copy_(total)
