"""Training on real ranks, compared with plain steps in one process on the batches of all ranks.

One rank calls no collectives by itself. ``DS_EXT_COMMUNICATE_ALONE=1`` makes it call them, so that
one GPU suffices to run NCCL, its streams, and the groups with queues of their own. The judge steps
after backward, by torch's operations, without a process group.
"""

import contextlib
import math
import os
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ds_ext
from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting, using_kernels
from benchmarks.memory import OURS, llama
from ds_ext.backward import fuse
from ds_ext.distributed import placement
from ds_ext.distributed.groups import Group, everyone
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Replicated, Sharded

OPTIMIZERS = ("AdaLomo", "CAME")  # one and two rounds
ALL_REDUCE, ZERO2, FSDP2 = "all-reduce", "ZeRO-2's placement", "FSDP2"
WAYS = (ALL_REDUCE, ZERO2, FSDP2)
CLOSE = 1e-5  # of the norm of a parameter's update, in fp32
ROUNDING = 6e-8  # the relative error of a gradient that is rounded to fp32 once more
FLOORS = 2.0  # of the error that such a rounding makes in the judge itself


def rows(on: Setting) -> Rows:
    """Trains on one rank, and on two if there are two GPUs."""
    worlds = (1,) if on.is_rehearsal or torch.cuda.device_count() < 2 else (1, 2)
    for world in worlds:
        yield from of_ranks(on, world)


def of_ranks(on: Setting, world: int) -> Rows:
    """Trains on ranks, each in a process of its own, and yields what the first one found."""
    port = free_port()
    if on.is_rehearsal and world == 1:
        found = [train_all(0, 1, port, on)]
    else:
        with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
            begun = [pool.submit(train_all, rank, world, port, on) for rank in range(world)]
            found = [one.result() for one in begun]
    for row in found[0]:
        yield f"{world} rank{'s' * (world > 1)}", row


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def train_all(rank: int, world: int, port: int, on: Setting) -> list[Row]:
    """Joins the other ranks, and trains with them."""
    if not on.is_rehearsal:
        torch.cuda.set_device(rank)
    backend = "gloo" if on.is_rehearsal else "nccl"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world)
    try:
        return on_rank(rank, world, on)
    finally:
        dist.destroy_process_group()


def on_rank(rank: int, world: int, on: Setting) -> list[Row]:
    """Trains by each optimizer in each way on this rank of the process group."""
    with (
        mock.patch.dict(os.environ, {"DS_EXT_COMMUNICATE_ALONE": "1"}),
        using_kernels(on.trains_by),
    ):
        names = on.some(OPTIMIZERS)
        return [row for name in names for row in compared(name, rank, world, on)]


def compared(name: str, rank: int, world: int, on: Setting) -> Iterator[Row]:
    """Trains in each way, and compares the weights with the judge's."""
    device = torch.device(on.device.type, rank) if not on.is_rehearsal else on.device
    before, expected, limit = judge(name, world, device, on)
    for way in WAYS:
        with counted() as counts:
            found = trained(name, way, rank, device, on)
        error = error_of(found, expected, before)
        has_summed = counts["rounds"] and (counts["sums of gradients"] or way == FSDP2)
        yield {
            "optimizer": name,
            "way": way,
            "backend": dist.get_backend(),
            "sums of gradients": counts["sums of gradients"] if way != FSDP2 else "by FSDP2",
            "rounds": counts["rounds"],
            "error": error,
            "limit": limit,
            "verdict": RIGHT if error <= limit and has_summed else WRONG,
        }


def error_of(found: list[Tensor], expected: list[Tensor], before: list[Tensor]) -> float:
    """The largest error of a parameter relative to the norm of its update."""
    errors = [
        float((a.double() - b.double()).norm() / (b.double() - w.double()).norm())
        for a, b, w in zip(found, expected, before, strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def model_of(device: torch.device, on: Setting) -> nn.Module:
    """The same fp32 model on all ranks, whose backward pass repeats its bits."""
    model = llama(on.exact, torch.float32, device)
    model.set_attn_implementation("eager")
    return model


def batch(step: int, rank: int, on: Setting) -> dict[str, list[int]]:
    """A row of tokens. The first is no label, so the mean is over as many labels as are given."""
    random = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, on.exact[0], (min(on.length, 256),), generator=random).tolist()
    return {"input_ids": tokens, "labels": [-100, *tokens[1:]]}


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device, on: Setting) -> Tensor:
    given = {key: torch.tensor([x], device=device) for key, x in batch(step, rank, on).items()}
    loss: Tensor = model(**given).loss
    return loss


def judge(
    name: str, world: int, device: torch.device, on: Setting
) -> tuple[list[Tensor], list[Tensor], float]:
    """Plain steps by the gradients of the mean loss of all ranks.

    Returns:
        Weights before and after, and the largest error of a run that is right: what one more
        rounding of each gradient changes here, twice, because some rules amplify it.
    """
    before, expected = plain(name, world, device, on, 0.0)
    floor = error_of(plain(name, world, device, on, ROUNDING)[1], expected, before)
    return before, expected, max(CLOSE, FLOORS * floor)


def plain(
    name: str, world: int, device: torch.device, on: Setting, rounding: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights before and after plain steps, whose gradients have a random error of this size."""
    with using_kernels(None):
        model = model_of(device, on)
        before = weights(model)
        optimizer = OURS[name].for_model(model)
        for step in range(on.exact_steps):
            for rank in range(world):
                (loss_of(model, step, rank, device, on) / world).backward()
            for param in model.parameters():
                if rounding and param.grad is not None:
                    param.grad.mul_(1 + rounding * torch.randn_like(param.grad))
            optimizer.step()
            optimizer.zero_grad()
    return before, weights(model)


def trained(name: str, way: str, rank: int, device: torch.device, on: Setting) -> list[Tensor]:
    """Weights after steps inside backward on the ranks of the process group."""
    model = model_of(device, on)
    if way == FSDP2:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = OURS[name].for_model(model)
    layout_of = zero2_layout if way == ZERO2 else fuse._whole_layout
    with mock.patch.object(fuse, "_whole_layout", layout_of):
        fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=on.exact_bucket)
    for step in range(on.exact_steps):
        loss_of(model, step, rank, device, on).backward()
        optimizer.step()
    found = weights(model)
    fused.remove()
    return found


def zero2_layout(model: nn.Module, group: Group) -> Layout:
    """A layout in which each rank updates its run of each parameter, as under ZeRO-2."""
    sharded = Sharded(group or everyone())
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return Layout(sharded.group, names, lambda param: sharded)


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of all weights; all ranks of FSDP2 call it."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts collectives of gradients and of rules' sums that ds_ext begins."""
    counts: Counter[str] = Counter()

    def noting(kind: str, original: Any) -> Any:
        def begin(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return original(*args, **kwargs)

        return begin

    with (
        mock.patch.object(
            Replicated, "_begin_sum", noting("sums of gradients", Replicated._begin_sum)
        ),
        mock.patch.object(Sharded, "_begin_sum", noting("sums of gradients", Sharded._begin_sum)),
        mock.patch.object(placement.dist, "all_reduce", noting("rounds", dist.all_reduce)),
    ):
        yield counts
