"""Predicts the time of counted steps on given machines, and when rounds dominate a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks import links
from benchmarks.collectives import ALL_REDUCE, REDUCE_SCATTER, Call
from benchmarks.giants import Counted
from benchmarks.links import Link

SHARE = 0.1  # rounds dominate a step from this share on
LARGER = [2**k for k in range(24, 36, 2)]  # reduce_bucket_size
GROUP = 64  # ranks of a group: ds_ext.shard_size
# One of each kind. Other optimizers have as many rounds as one of these, or only the norm's.
JUDGED = ("AdaLomo", "CAME", "LAMB", "SinkGD", "Muon", "GaLoreAdamW", "GaLoreAdamW, renewing")


class Given(NamedTuple):
    """The assumed properties of the machines."""

    link: Link
    algorithm: str
    tokens: int
    flops: float

    def takes(self, call: Call, ranks: int) -> float:
        return links.seconds(call, ranks, self.link, self.algorithm)


class Times(NamedTuple):
    """The seconds of a step and of its parts."""

    gradients: float
    rounds: float
    step: float
    rest: float  # the step's time without rounds

    @property
    def dominated(self) -> bool:
        return self.rounds > self.gradients or self.rounds > SHARE * self.step


def times(counted: Counted, kind: str, given: Given, takes: links.Takes | None = None) -> Times:
    """Returns the times of a step. ``takes`` replaces the time model of ``given``."""
    takes = takes or given.takes
    step = counted.step(kind)
    ready = counted.ready(step, 2 * given.tokens / given.flops)
    bare = [bucket._replace(rounds=()) for bucket in step]
    each = [links.parts(bucket, takes) for bucket in step]
    others = sum(links.parts(bucket, takes)[1] for bucket in bare)  # gathers of new weights
    return Times(
        sum(gradients for gradients, _ in each),
        sum(rounds for _, rounds in each) - others,
        links.chain(step, takes, ready, beside=False),
        links.chain(bare, takes, ready, beside=False),
    )


def in_groups(given: Given, ranks: int) -> links.Takes:
    """Returns the time of calls if ZeRO shards among GROUP ranks, out of ``ranks`` ranks."""

    def takes(call: Call, among: int) -> float:
        own = given.takes(call, among)
        if call.kind != REDUCE_SCATTER or ranks <= GROUP:
            return own
        return own + given.takes(Call("", ALL_REDUCE, call.nbytes // among), ranks // GROUP)

    return takes


def timed(counted: Counted, kind: str, given: Given) -> dict[str, object]:
    """Returns a row with a step's times."""
    found = times(counted, kind, given)
    return {
        "model": counted.name,
        "ranks": counted.ranks,
        "algorithm": given.algorithm,
        "optimizer": kind,
        "gradients, s": found.gradients,
        "rounds, s": found.rounds,
        "step, s": found.step,
        "rounds / gradients": found.rounds / found.gradients,
        "rounds / step": f"{found.rounds / found.step:.2%}",
        "not hidden / step": f"{1 - found.rest / found.step:.2%}",
        "dominate": "yes" if found.dominated else "no",
    }


def dominating(
    counted: Sequence[Counted], given: Mapping[str, Given]
) -> Iterator[dict[str, object]]:
    """Yields rows with the lowest number of ranks at which rounds dominate a step."""
    counted = sorted(counted, key=lambda c: c.ranks)
    for kind in JUDGED:
        row: dict[str, object] = {"model": counted[0].name, "optimizer": kind}
        for name, how in given.items():
            all_times = [(c.ranks, times(c, kind, how)) for c in counted]
            first = next((f"{ranks:,}" for ranks, found in all_times if found.dominated), None)
            ranks, last = all_times[-1]
            row[name] = first or f"> {ranks:,} ({last.rounds / last.step:.2%} there)"
        yield row


def by_bucket(counted: Counted, tree: Given, ring: Given) -> Iterator[dict[str, object]]:
    """Yields rows with AdaLomo's rounds by bucket size."""
    kind = "AdaLomo"
    for size in [size for size in LARGER if size >= counted.size]:
        larger = replace(counted, size=size)
        yield _row(larger, f"{size:,}", {g: times(larger, kind, g) for g in (tree, ring)})


def by_groups(counted: Counted, tree: Given, ring: Given) -> Iterator[dict[str, object]]:
    """Yields rows with rounds by ``shard_size``."""
    for kind in JUDGED:
        for shard in (0, GROUP):
            of = replace(counted, ranks=shard) if shard else counted
            row: dict[str, object] = {
                "model": counted.name,
                "optimizer": kind,
                "shard_size": shard or "all",
            }
            for given in (tree, ring):
                takes = in_groups(given, counted.ranks) if shard else given.takes
                found = times(of, kind, given, takes)
                row[f"rounds, s, {given.algorithm}"] = found.rounds
                row[f"rounds / step, {given.algorithm}"] = f"{found.rounds / found.step:.2%}"
            yield row


def _row(counted: Counted, label: str, found: Mapping[Given, Times]) -> dict[str, object]:
    step = counted.step("AdaLomo")
    row: dict[str, object] = {
        "model": counted.name,
        "reduce_bucket_size": label,
        "buckets": sum(len(bucket.gradients) for bucket in step),
        "rounds": sum(len(bucket.rounds) for bucket in step),
        "gradients in flight, GB": counted.in_flight / 1e9,
    }
    for given, t in found.items():
        row[f"rounds, s, {given.algorithm}"] = t.rounds
        row[f"rounds / step, {given.algorithm}"] = f"{t.rounds / t.step:.2%}"
    return row


def enough(counted: Counted, kind: str, given: Given) -> dict[str, object]:
    """Returns a row with the smallest bucket size at which rounds do not dominate a step."""
    row: dict[str, object] = {
        "model": counted.name,
        "optimizer": kind,
        "algorithm": given.algorithm,
    }
    for size in [size for size in LARGER if size >= counted.size]:
        larger = replace(counted, size=size)
        found = times(larger, kind, given)
        if not found.dominated:
            return row | {
                "reduce_bucket_size": size,
                "gradients in flight, GB": larger.in_flight / 1e9,
                "rounds / step": f"{found.rounds / found.step:.2%}",
            }
    return row | {
        "reduce_bucket_size": "none",
        "gradients in flight, GB": None,
        "rounds / step": f"{found.rounds / found.step:.2%}",
    }
