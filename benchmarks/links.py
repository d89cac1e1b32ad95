"""A model of time, latency · messages + bytes / bandwidth, and its fit to gloo on this machine."""

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.collectives import ALL_REDUCE, Call, sent

if TYPE_CHECKING:
    from benchmarks.counting import Bucket

RING, TREE = "ring", "tree"
ALGORITHMS = (TREE, RING)


class Link(NamedTuple):
    """What connects a rank to others."""

    latency: float  # seconds of one message
    bandwidth: float  # bytes a second that a rank sends


def messages(kind: str, ranks: int, algorithm: str) -> int:
    """Messages that have to follow one another in a collective.

    A ring's go round once, or twice in an all-reduce; a tree's (or halving and doubling's) up, and
    down again in an all-reduce. Either sends the same bytes: what NCCL's do.
    """
    once = ranks - 1 if algorithm == RING else math.ceil(math.log2(ranks))
    return (2 if kind == ALL_REDUCE else 1) * once


def seconds(call: Call, ranks: int, link: Link, algorithm: str) -> float:
    """What a collective takes."""
    waits = messages(call.kind, ranks, algorithm) * link.latency
    return waits + sent(call.kind, call.nbytes, ranks) / link.bandwidth


# The order of a step.

Takes = Callable[[Call, int], float]  # a call among so many ranks


def parts(bucket: "Bucket", takes: Takes) -> tuple[float, float]:
    """What the gradients of a bucket take, and then its rounds; with what goes before and after."""
    each = [takes(call, bucket.ranks) for call in bucket.calls]
    n = len(bucket.agreed) + len(bucket.gradients)
    return sum(each[:n]), sum(each[n:])


def chain(buckets: Sequence["Bucket"], takes: Takes, ready: Sequence[float], beside: bool) -> float:
    """The end of the last round of a step, bucket i having been filled at ``ready[i]``.

    When a bucket is full its gradients are sent, and then come the rounds of the bucket before.
    All of this is in one line, as on a GPU, where it shares a stream; or with ``beside`` gradients
    travel beside rounds, as with gloo.
    """
    each = [parts(bucket, takes) for bucket in buckets]
    sending = stepping = arrived = 0.0
    for i, (gradients, _) in enumerate(each):
        start = max(sending if beside else max(sending, stepping), ready[i])
        sending = start + gradients
        if i:
            behind = max(stepping, arrived, ready[i]) if beside else sending
            stepping = behind + each[i - 1][1]
        arrived = sending
    return max(stepping, arrived) + each[-1][1]


def longest(buckets: Sequence["Bucket"]) -> int:
    """Collectives that have to follow one another in a step, gradients beside rounds."""
    return round(chain(buckets, lambda *_: 1, [0.0] * len(buckets), beside=True))


# The fit.

SIZES = tuple(4**k for k in range(5, 14))  # bytes: 1 KiB to 64 MiB
FEW, MANY = 5, 40  # times that a size is measured


class Sample(NamedTuple):
    """A measured all-reduce."""

    ranks: int
    nbytes: int
    seconds: float


def measure(ranks: int, sizes: Sequence[int] = SIZES) -> list[Sample]:
    """All-reduces by gloo among real ranks on this machine: the least time of each size."""
    return [Sample(ranks, n, t) for n, t in zip(sizes, _on_ranks(ranks, _each, sizes), strict=True)]


def replay(ranks: int, sizes: Sequence[int]) -> float:
    """These all-reduces one after another, a step's rounds: the sum of the least time of each."""
    return _on_ranks(ranks, _all, sizes)[0]


def fit(samples: Sequence[Sample]) -> tuple[Link, list[float]]:
    """The link that explains all-reduces best -> it, and predicted / measured - 1 of each.

    Least squares of these, for sizes differ by five orders of magnitude.
    """
    rows = [
        (messages(ALL_REDUCE, s.ranks, RING), sent(ALL_REDUCE, s.nbytes, s.ranks)) for s in samples
    ]
    times = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    a = torch.tensor(rows, dtype=torch.float64) / times[:, None]
    scale = a.norm(dim=0)  # the columns differ by ten orders of magnitude
    found = torch.linalg.lstsq(a / scale, torch.ones(len(a), 1, dtype=torch.float64)).solution
    x = found[:, 0] / scale
    latency, per_byte = x.tolist()
    if latency <= 0 or per_byte <= 0:
        raise RuntimeError(f"no latency and bandwidth explain {samples}: measure again, alone.")
    return Link(latency, 1 / per_byte), (a @ x - 1).tolist()


def _each(sizes: Sequence[int]) -> list[float]:
    return [_least([n], MANY if n < 2**20 else FEW)[0] for n in sizes]


def _all(sizes: Sequence[int]) -> list[float]:
    return [sum(_least(sizes, FEW))]


def _least(sizes: Sequence[int], times: int) -> list[float]:
    """Seconds of each all-reduce: the least, for other processes may share the machine."""
    tensors = [torch.zeros(n // 4) for n in sizes]
    least = [math.inf] * len(sizes)
    for _ in range(times):
        dist.barrier()
        for i, x in enumerate(tensors):
            began = time.perf_counter()
            dist.all_reduce(x)
            least[i] = min(least[i], time.perf_counter() - began)
    return least


def _on_ranks(
    ranks: int, job: Callable[[Sequence[int]], list[float]], sizes: Sequence[int]
) -> list[float]:
    """What ``job`` finds on the first of ``ranks`` new processes."""
    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torch.multiprocessing.spawn(_rank, (ranks, address, job, sizes, found), ranks)
    return found.get()


def _rank(rank, ranks, address, job, sizes, found) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    measured = job(sizes)
    dist.barrier()
    if rank == 0:
        found.put(measured)
    os._exit(0)  # torch sometimes aborts in the teardown of a gloo group
