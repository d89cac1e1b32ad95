"""Sequences in processes that may die: many until one fails, and that one made short."""

import json
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import worlds
from tests.scenarios import driver
from tests.scenarios.driver import Sequence
from tests.scenarios.ways import WAYS

NOT_ALONE = "which alone does not fail: the state of the process has a part in it"
LIMIT = 60.0  # seconds after which a sequence is taken to hang


@dataclass
class Search:
    """What was tried in a way, and what was found."""

    way: str
    sequences: int = 0
    calls: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def search(way: str, seconds: float, first: int = 0, count: int = 10**9, most: int = 1) -> Search:
    """Tries the sequences of ``count`` seeds, for so long, or until ``most`` of them failed."""
    found, began, seed = Search(way), time.monotonic(), first
    while seed < first + count and len(found.findings) < most:
        left = began + seconds - time.monotonic()
        if left <= 0:
            break
        with tempfile.NamedTemporaryFile("r") as progress:
            given = seed, first + count, left, progress.name
            try:
                seed, done, wrong, calls, refusals = on(way, explore, *given, limit=left + LIMIT)
                found.calls += calls
                found.refusals += refusals
            except AssertionError as error:  # a process died or hangs
                at = Path(progress.name).read_text() or f"[{seed}, 0]"
                seed, done, wrong = *json.loads(at), shown(error)
        if wrong:
            found.findings.append(report(way, seed, done, wrong, time.monotonic() - began))
        seed += 1
    found.sequences, found.seconds = seed - first, time.monotonic() - began
    return found


def explore(way: str, seed: int, end: int, seconds: float, progress: str) -> tuple[Any, ...]:
    """A job: the sequences of seeds until one fails, with what it came to, or the time is over."""
    until, calls, refusals = time.monotonic() + seconds, 0, Counter[str]()
    while True:

        def note(done: int, seed: int = seed) -> None:
            Path(progress).write_text(json.dumps([seed, done]))

        done, wrong, refused = driver.play(way, driver.made(way, seed), note)
        calls, refusals = calls + done, refusals + refused
        is_over = [seed + 1 == end or time.monotonic() > until]
        if dist.is_initialized():
            dist.broadcast_object_list(is_over)
        if wrong or is_over[0]:
            return seed, done, wrong, calls, refusals
        seed += 1


def on(way: str, job: Any, *args: Any, limit: float = LIMIT) -> Any:
    """The result of a job on the ranks of a way; AssertionError if one dies or hangs."""
    world = WAYS[way].world
    if world > 1:
        return worlds.run(world, job, way, *args, limit=limit)[0]
    (ended,) = worlds.fresh(1, without_group, job, way, *args, limit=limit)
    if ended.code:
        raise AssertionError(f"rank 0 ended with status {ended.code}\n{ended.output}")
    return ended.result


def without_group(job: Any, *args: Any) -> Any:
    """Runs a job in a process that belongs to no process group."""
    dist.destroy_process_group()
    return job(*args)


def fails(way: str, sequence: Sequence) -> str:
    """What is wrong with a sequence by itself; "" if nothing."""
    try:
        return on(way, driver.play, sequence)[1]
    except AssertionError as error:
        return shown(error)


def shown(error: AssertionError) -> str:
    """The end of what each rank printed, which worlds.py reports one after another."""
    parts = re.split(r"^(?=rank \d+ (?:raised|had not|died|ended))", str(error), flags=re.M)
    return "\n".join(part[:100] + "\n" + part[100:][-2000:] for part in parts)


def report(way: str, seed: int, done: int, wrong: str, seconds: float) -> str:
    """What is told of a failure: the seed, and the shortest sequence that still fails."""
    setup, calls = driver.made(way, seed)
    calls, how = calls[:done], NOT_ALONE
    if fails(way, (setup, calls)):
        setup, calls = driver.shortest((setup, calls), lambda s: bool(fails(way, s)))
        how, wrong = "of which this is left:", fails(way, (setup, calls)) or wrong
    lines = [f"    {name} (seed {number})" for name, number in calls]
    head = f"{way}, seed {seed}, found after {seconds:.0f} s, {how}"
    return "\n".join([head, f"    {setup}", *lines, wrong])
