"""What a step of Muon sends and computes: ds_ext's at ZeRO-3, DeepSpeed's, microsoft/dion's.

The counts follow the code of DeepSpeed 0.19.8 (``_muon_update_sub_group`` in stage3.py) and of
microsoft/dion at commit 0a059a4 (``megabatch_orthogonalize_async``), with their default settings
and gradients in bf16. Dion's runs on FSDP2, which divides rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ds_ext.ops import turns
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS

Matrix = tuple[int, ...]  # rows and columns
StepCostFunction = Callable[[Sequence[Matrix], Sequence[int], int, int], "StepCost"]
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
ALL_TO_ALL = "all-to-all"
BYTES = 2  # of a bf16 number
PRODUCTS = 3  # of bf16 matrices in ds_ext's product of two operands with two terms each
STEPS = 5  # of the iteration, the default of all three
# Assumed, for seconds: bytes per second that a rank sends, and operations per second.
BANDWIDTH, SPEED = 50e9, 4e14


class StepCost(NamedTuple):
    """What a step sends and computes."""

    calls: list[tuple[str, int]]  # collectives, and the bytes of the whole tensor of each
    operations: float  # of the slowest rank in each bucket or group of matrices, added up

    def sent(self, ranks: int) -> float:
        """Returns the bytes that a rank sends in rings, or directly to each other rank."""
        twice = (2 if kind == ALL_REDUCE else 1 for kind, _ in self.calls)
        whole = sum(n * size for n, (_, size) in zip(twice, self.calls, strict=True))
        return whole * (ranks - 1) / ranks

    def seconds(self, ranks: int) -> float:
        """Returns the assumed time without latencies, if nothing overlaps."""
        return self.sent(ranks) / BANDWIDTH + self.operations / SPEED


def divided(
    shapes: Mapping[str, tuple[int, ...]], rules: Mapping[str, Any]
) -> tuple[list[Matrix], list[int]]:
    """Returns the shapes of the matrices that Muon steps, and the elements of the others."""
    kind = OPTIMIZERS["muon"].hypers
    is_muon = {name: isinstance(rules[name], kind) and len(shapes[name]) == 2 for name in shapes}
    matrices = [shape for name, shape in shapes.items() if is_muon[name]]
    return matrices, [math.prod(shape) for name, shape in shapes.items() if not is_muon[name]]


def summary(matrices: Sequence[Matrix], others: Sequence[int], ranks: int, bucket: int) -> str:
    """Returns lines with the cost of each of ``STEPS_OF``; arguments as of ``ds_ext``."""
    lines = [
        f"A step of Muon per rank, {STEPS} steps of the iteration, bf16; assumed: "
        f"{BANDWIDTH / 1e9:g} GB/s, {SPEED:g} operations/s, no overlap"
    ]
    for name, step in STEPS_OF.items():
        cost = step(matrices, others, ranks, bucket)
        lines.append(
            f"{name:<24}  {cost.sent(ranks) / 1e9:10.4g} GB sent  {cost.operations:8.2e} "
            f"operations  {cost.seconds(ranks):8.3g} s"
        )
    return "\n".join(lines)


def ds_ext(matrices: Sequence[Matrix], others: Sequence[int], ranks: int, bucket: int) -> StepCost:
    """Returns the cost of ds_ext's Muon, with whole buckets of matrices in the model's order.

    Args:
        matrices: the shapes of the matrices that Muon steps.
        others: the elements of each of the other parameters.
        ranks: the number of data-parallel ranks.
        bucket: reduce_bucket_size, in elements.
    """
    rule = OPTIMIZERS["muon"].hypers(ns_steps=STEPS)
    calls = [(REDUCE_SCATTER, _padded(others, ranks))]
    operations = 0.0
    for some in _chunks(matrices, bucket):
        calls.append((REDUCE_SCATTER, _padded(map(math.prod, some), ranks)))
        shards = [Shard.of_rank(shape, 0, ranks) for shape in some]
        rounds = [_rounds(shard) for shard in shards]
        calls += [(ALL_REDUCE, sum(r[i] for r in rounds if len(r) > i)) for i in range(3)]
        costs = [rule.operations(shard) for shard in shards]
        loads = [0.0] * ranks
        works = ((turns.SharedWork(cost, ranks),) for cost in costs)
        chosen = turns.balanced(tuple(turns.SharedParam(0, ranks, work) for work in works))
        for turn, cost in zip(chosen, costs, strict=True):
            loads[turn] += cost
        operations += max(loads)
        for rows, cols in some:  # products of each rank's rows
            gram = 1.3 * cols**2 * rows if rows >= cols else 0
            operations += (gram + 2 * min(rows, cols) * rows * cols) / ranks
    return StepCost([call for call in calls if call[1]], PRODUCTS * operations)


def _rounds(shard: Shard) -> list[int]:
    """The bytes of each round of a matrix, as rules/muon.py describes them."""
    short = min(shard.rows, shard.cols)
    packed = 4 * ((short + 1) // 2) * (short + 1)
    if shard.rows < shard.cols:
        return [4 * shard.numel, packed]
    edges = {at // shard.cols for at in shard.starts if at % shard.cols}
    return [4 * len(edges) * shard.cols] * bool(edges) + [packed, packed]


def deepspeed(
    matrices: Sequence[Matrix], others: Sequence[int], ranks: int, bucket: int
) -> StepCost:
    """Returns the cost of DeepSpeed's Muon at ZeRO-3; arguments as of ``ds_ext``.

    It all-reduces gradients, then gathers the gradients and the momentum of a bucket. In rounds of
    one matrix per rank, each rank iterates on a matrix and gathers its update and its momentum, all
    padded to the largest matrix of the round. It sorts matrices by shape, but not if ``zero.Init``
    made the model; that case is not counted.
    """
    calls = [(ALL_REDUCE, BYTES * (sum(others) + sum(map(math.prod, matrices))))]
    operations = 0.0
    for some in _chunks(sorted(matrices, reverse=True), bucket):
        calls += [(ALL_GATHER, _padded(map(math.prod, some), ranks))] * 2
        for at in range(0, len(some), ranks):
            together = some[at : at + ranks]
            calls += [(ALL_GATHER, BYTES * ranks * max(map(math.prod, together)))] * 2
            operations += max(map(_gram_newton_schulz, together))
    return StepCost(calls, operations)


def dion(matrices: Sequence[Matrix], others: Sequence[int], ranks: int, bucket: int) -> StepCost:
    """Returns the cost of dion's Muon on FSDP2; arguments as of ``ds_ext``; no ``bucket``.

    Matrices of one shape, padded to a multiple of ``ranks``, go by an all-to-all to the ranks that
    iterate on them, and their updates come back by another.
    """
    calls = [(REDUCE_SCATTER, BYTES * (sum(others) + sum(map(math.prod, matrices))))]
    operations = 0.0
    for (rows, cols), count in Counter(matrices).items():
        each = -(-count // ranks)
        part = -(-rows // ranks) * cols
        calls += [(ALL_TO_ALL, BYTES * each * ranks * part)] * 2
        short, long = sorted((rows, cols))
        operations += each * STEPS * (4 * short**2 * long + 2 * short**3)
    return StepCost(calls, operations)


STEPS_OF: dict[str, StepCostFunction] = {
    "ds_ext's Muon, ZeRO-3": ds_ext,
    "DeepSpeed's Muon, ZeRO-3": deepspeed,
    "dion's Muon, FSDP2": dion,
}


def _gram_newton_schulz(shape: Matrix) -> float:
    """The operations of DeepSpeed's iteration on a matrix: five steps, restarted after two."""
    short, long = sorted(shape)
    return 30 * short**3 if short == long else 8 * short**2 * long + 28 * short**3


def _padded(sizes: Iterable[int], ranks: int) -> int:
    """The bytes of bf16 parameters, each padded to a multiple of ``ranks``."""
    return BYTES * sum(-(-size // ranks) * ranks for size in sizes)


def _chunks(matrices: Sequence[Matrix], bucket: int) -> Iterator[list[Matrix]]:
    """Consecutive matrices of at most ``bucket`` elements, or a single one."""
    some: list[Matrix] = []
    for shape in matrices:
        if some and sum(map(math.prod, some)) + math.prod(shape) > bucket:
            yield some
            some = []
        some.append(shape)
    if some:
        yield some
