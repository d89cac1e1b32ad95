"""A time model, latency · messages + bytes / bandwidth, and its fit to gloo on this machine."""

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
    """The connection of a rank to other ranks."""

    latency: float  # seconds of one message
    bandwidth: float  # bytes per second that a rank sends


def messages(kind: str, ranks: int, algorithm: str) -> int:
    """Returns the number of sequential messages in a collective.

    A ring passes messages around once, or twice in an all-reduce. A tree (or halving and doubling)
    passes them up, and in an all-reduce also down. Both send the same bytes, as in NCCL.
    """
    once = ranks - 1 if algorithm == RING else math.ceil(math.log2(ranks))
    return (2 if kind == ALL_REDUCE else 1) * once


def seconds(call: Call, ranks: int, link: Link, algorithm: str) -> float:
    """Returns the time of a collective."""
    waits = messages(call.kind, ranks, algorithm) * link.latency
    return waits + sent(call.kind, call.nbytes, ranks) / link.bandwidth


# The order of a step.

Takes = Callable[[Call, int], float]  # (call, number of ranks) -> seconds


def parts(bucket: "Bucket", takes: Takes) -> tuple[float, float]:
    """Returns the time of a bucket's gradients and that of its rounds, with their other calls."""
    each = [takes(call, bucket.ranks) for call in bucket.calls]
    n = len(bucket.agreed) + len(bucket.gradients)
    return sum(each[:n]), sum(each[n:])


def chain(buckets: Sequence["Bucket"], takes: Takes, ready: Sequence[float], beside: bool) -> float:
    """Returns the time at which the last round of a step ends.

    Bucket i is full at ``ready[i]``. Its gradients are then sent, and the rounds of the previous
    bucket follow. On a GPU both share one stream. With ``beside``, gradients and rounds overlap, as
    with gloo.
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
    """Returns the number of sequential collectives in a step if gradients and rounds overlap."""
    return round(chain(buckets, lambda *_: 1, [0.0] * len(buckets), beside=True))


# The fit.

SIZES = tuple(4**k for k in range(5, 14))  # bytes: 1 KiB to 64 MiB
FEW, MANY = 5, 40  # repetitions for large and small sizes


class Sample(NamedTuple):
    """A measured all-reduce."""

    ranks: int
    nbytes: int
    seconds: float


def measure(ranks: int, sizes: Sequence[int] = SIZES) -> list[Sample]:
    """Returns the shortest time of a gloo all-reduce of each size, on real ranks."""
    return [Sample(ranks, n, t) for n, t in zip(sizes, _on_ranks(ranks, _each, sizes), strict=True)]


def replay(ranks: int, sizes: Sequence[int]) -> float:
    """Returns the time of a sequence of all-reduces: the sum of the shortest time of each."""
    return _on_ranks(ranks, _all, sizes)[0]


def fit(samples: Sequence[Sample]) -> tuple[Link, list[float]]:
    """Returns the link that fits all-reduces best, and predicted / measured - 1 of each.

    It minimizes the squares of these relative errors, because sizes differ by five orders of
    magnitude.
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
    """The shortest time of each all-reduce. Other processes may use the machine too."""
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
    """The result of ``job`` on the first of ``ranks`` new processes."""
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
