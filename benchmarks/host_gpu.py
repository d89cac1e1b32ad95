"""Time of the host in a step by kernels, whose launches do nothing: on a GPU, or as if on one.

Without a GPU tensors of the CPU stand for its tensors. Not in the times then: copies from pinned
memory, and what an operation of torch takes to launch.
"""

import gc
import importlib.util
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_ext
from benchmarks.memory import LLAMAS, shapes_of
from ds_ext.backward import gradient_config
from ds_ext.ops.executors import unbatched
from ds_ext.ops.executors.native import native_table
from ds_ext.ops.executors.triton import devices, launch_memory, launches
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS, plain_step
from ds_ext.optimizer.updates import RunUpdate

Bucket = list[RunUpdate]
BUCKET = gradient_config.gpu_bucket_size(torch.bfloat16.itemsize)
NOTHING = SimpleNamespace(all_reduce=lambda sums: None)  # the collectives of no ranks
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS = 2

TEXT = f"""
The table "By kernels" is of steps, on bf16 weights of Llama-7B and the gradients that rank 0
of {RANKS} has, the rounds included in which it would meet the other. Launches do nothing; what is
timed is Python, torch's small operations, and the copies of addresses. `launches` of kernels,
`copies` of addresses to the device, `rounds` and calls of `torch` that are no views are of a
bucket; `most` is the number of launches between two rounds. Where there is no GPU, its tensors lie
in the memory of the CPU, and copies to it and launches of torch's operations take less time than
they would. Memory of gradients and steps is then reused without a call of torch, which takes a
GPU's allocator a few microseconds.

The table "In backward" is of `fuse_into_backward` in one process: the hooks of all gradients and
the end of the step, but not backward itself, with buckets of {BUCKET:,} elements, the default on a
GPU, and of a matrix each.
"""


def row(name: str, rounds: int) -> dict[str, object]:
    """What the host takes of steps by an optimizer."""
    with doing_nothing() as counts:
        params = weights()
        optimizer = OPTIMIZERS[name](params, **({"lr": 1e-6} if name != "adafactor" else {}))
        buckets = list(halves(params))
        seconds = []
        for _ in range(3 + rounds):
            began = time.perf_counter()
            for bucket in buckets:
                optimizer.update(bucket, NOTHING)
                optimizer.commit_weight_norms()
            seconds.append(time.perf_counter() - began)
        counts.clear()
        between: list[int] = []

        def reduce(total: Tensor) -> None:
            between.append(counts["launches"])

        with Calls() as calls:
            met = 0
            for bucket in buckets:
                before = counts["launches"]
                met += optimizer.update(bucket, SimpleNamespace(all_reduce=reduce))
                optimizer.commit_weight_norms()
                ends = [before, *between, counts["launches"]]
                counts["most"] = max(counts["most"], *(b - a for a, b in itertools.pairwise(ends)))
                between.clear()
    n = len(buckets)
    return {
        "optimizer": OPTIMIZERS[name].__name__,
        "7B, ms": statistics.median(seconds[3:]) * 1e3,
        "buckets": n,
        "launches": counts["launches"] / n,
        "most": counts["most"],
        "rounds": met / n,
        "copies": counts["copies"] / n,
        "torch": calls.made / n,
    }


def in_backward(name: str, rounds: int) -> dict[str, object]:
    """What the host takes of a step inside backward."""
    found: dict[str, object] = {"optimizer": OPTIMIZERS[name].__name__}
    for label, size in (("", BUCKET), ("of a matrix: ", 1)):
        gc.collect()  # earlier models, whose owners this step would ask
        with doing_nothing():
            params = weights()
            model = nn.ParameterList(params)
            optimizer = OPTIMIZERS[name](params, **({"lr": 1e-6} if name != "adafactor" else {}))
            fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=size)
            # Views of one block, which cost nothing to free, as memory of a GPU's allocator.
            sizes = [p.numel() for p in params]
            grads = torch.empty(sum(sizes), dtype=torch.bfloat16, device=DEVICE).split(sizes)
            seconds = []
            for _ in range(3 + rounds):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.view(param.shape)
                began = time.perf_counter()
                with torch.no_grad():  # as in hooks
                    for param in reversed(params):
                        fused.buckets.take(param)
                optimizer.step()
                seconds.append(time.perf_counter() - began)
            n = len(fused.buckets.pieces(params[::-1]))
            fused.remove()
        median = statistics.median(seconds[3:])
        found |= {f"{label}buckets": n, f"{label}7B, ms": median * 1e3}
        found |= {f"{label}µs a bucket": median / n * 1e6}
    return found


def are_there() -> bool:
    """Whether kernels can be asked for."""
    return importlib.util.find_spec("triton") is not None


def weights() -> list[nn.Parameter]:
    """Those of Llama-7B, which nobody reads or writes."""
    shapes = shapes_of(LLAMAS["7B"]).values()
    return [nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device=DEVICE)) for s in shapes]


def halves(params: list[nn.Parameter]) -> Iterator[Bucket]:
    """Rank 0's runs of buckets of as many elements as a plain step takes bucket_elements."""
    bucket: Bucket = []
    elements = 0
    for p in params:
        shard = Shard.of_rank(tuple(p.shape), 0, RANKS)
        run = p.detach().view(-1)[: len(shard)]
        bucket.append(RunUpdate(p, run, torch.empty_like(run), shard))
        elements += p.numel()
        if elements >= plain_step.BATCHED_BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def empty(shape: Any, fill: float, **kinds: Any) -> Tensor:
    """Memory that is not touched, for ``torch.full``."""
    return torch.empty(shape, **kinds)


class Calls(TorchDispatchMode):
    """Counts calls of torch that are no views."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        self.made += not is_view
        return func(*args, **kwargs or {})


@contextmanager
def doing_nothing() -> Iterator[Counter[str]]:
    """Kernels are launched and do nothing; memory is not touched. Counts launches and copies."""
    counts: Counter[str] = Counter()
    copy, make = launch_memory.DeviceArrays._copy, launch_memory.Memory._made

    def start(*args: object) -> None:
        counts["launches"] += 1

    def copied(*args: Any) -> None:
        counts["copies"] += 1
        copy(*args)

    free: dict[tuple[int, int], Tensor] = {}

    def made(memory: launch_memory.Memory, which: int, n: int) -> Tensor:
        """Memory of a step, reused as by a GPU's allocator. Kernels would write the zeros."""
        if (which, n) not in free:
            free[which, n] = make(memory, which, n)
        return free[which, n].view(-1)

    with (
        mock.patch.object(devices, "DEVICES", {DEVICE.type}),
        mock.patch.object(native_table, "is_available", lambda: False),
        mock.patch.object(launches, "launch_kernel", start),
        mock.patch.object(launch_memory.DeviceArrays, "_copy", copied),
        mock.patch.object(torch, "full", empty),  # states, of tens of gigabytes
        mock.patch.object(launch_memory.Memory, "_made", made if DEVICE.type == "cpu" else make),
    ):
        unbatched.forget_tables()
        yield counts
    unbatched.forget_tables()
