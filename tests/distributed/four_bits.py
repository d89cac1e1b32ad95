"""Gradients that are summed in 4 bits (ZeRO++ qgZ): jobs of test_four_bits.py, on real ranks."""

import os
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.utils import groups
from torch import Tensor

from tests.common import by_role
from tests.common.hypers import TRAINED
from tests.common.ranks import identical, logged, message, whole
from tests.distributed import eight_bits

STEPS = 3
SHAPES = {"wide": (48, 64), "tall": (96, 16), "odd": (9, 7), "small": (16,), "even": (33, 50)}
ROUNDED = ("wide", "tall", "even")  # the others have less than 256 elements a rank, or one row


class Given(eight_bits.Given):
    """Its gradients are given: those of this rank, or what all of them add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.even = torch.nn.Parameter(torch.randn(33, 50))
        self.summed: tuple[int, int] | None = None  # hosts and their ranks: in 4 bits

    def forward(self, step: int) -> Tensor:
        grads = gradients(step, dist.get_rank())
        if self.summed is not None:
            all_grads = [gradients(step, rank) for rank in range(dist.get_world_size())]
            grads = {n: mean([g[n] for g in all_grads], n, *self.summed) for n in grads}
        named = dict(self.named_parameters())
        return torch.stack([(named[n].float() * g).sum() for n, g in grads.items()]).sum()


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def mean(grads: list[Tensor], name: str, hosts: int, size: int) -> Tensor:
    """The mean of the ranks' gradients as it arrives."""
    return rounded_mean(grads, hosts, size) if name in ROUNDED else torch.stack(grads).mean(0)


def rounded_mean(grads: list[Tensor], hosts: int, size: int) -> Tensor:
    """The mean of the ranks' gradients as its runs are rounded on the way, by numpy."""
    ranks = hosts * size
    run = -(-grads[0].numel() // ranks)
    padded = [np.pad(g.numpy().ravel(), (0, run * ranks - g.numel())) for g in grads]
    found = []
    for rank in range(ranks):
        part = slice(rank * run, (rank + 1) * run)
        total = np.zeros(run, np.float32)
        for host in range(hosts):
            members = padded[host * size : (host + 1) * size]
            total += rounded(sum(rounded(member[part]) for member in members))
        found.append(total)
    values = np.concatenate(found)[: grads[0].numel()] / ranks
    return torch.from_numpy(values.astype(np.float32)).view(grads[0].shape)


def rounded(x: Any) -> Any:
    out = np.empty_like(x, dtype=np.float32)
    for first in range(0, len(x), 256):
        some = x[first : first + 256].astype(np.float32)
        scale = (some.max() if some.max() > -some.min() else some.min()) / np.float32(-8)
        out[first : first + 256] = np.clip(np.rint(some / scale), -8, 7) * scale
    return out


def engine_of(model: Given, rule: str, host_size: int, zero: dict[str, Any], **top: Any) -> Any:
    """DeepSpeed's engine where this rank's host has so many ranks."""
    optimizer = by_role.of_shapes(rule, model.parameters(), TRAINED[rule])
    config = eight_bits.config(False, **top)
    config["zero_optimization"] |= zero
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(host_size)):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(
    rule: str, max_norm: float, hosts: int, size: int, quantized: bool, summed: bool
) -> dict[str, Any]:
    """Steps by given gradients: of each rank, or the sum that numpy makes of them in 4 bits."""
    model = Given()
    model.summed = (hosts, size) if summed else None
    zero = {"zero_quantized_gradients": quantized}
    with logged() as said:
        engine = engine_of(model, rule, size, zero, gradient_clipping=max_norm)
    before = whole(model)
    for step in range(STEPS):
        engine.backward(engine(step))
        engine.step()
    after = whole(model)
    return {
        "moved": {n: after[n] - p for n, p in before.items()},
        "identical": identical(after),
        "bytes": engine.optimizer.metrics()["bytes_sent"],
        "said": [line for line in said if "quantized_gradients" in line],
    }


def both(rule: str, max_norm: float, hosts: int, size: int) -> dict[str, Any]:
    """A run whose gradients travel in 4 bits; and one that is given what these add up to."""
    return {
        "found": train(rule, max_norm, hosts, size, quantized=True, summed=False),
        "expected": train(rule, max_norm, hosts, size, quantized=False, summed=hosts > 1),
    }


def refused(size: int) -> str:
    """What is told where hosts have so many ranks, which do not divide the world."""
    return message(lambda: train("lomo", 0.0, 1, size, quantized=True, summed=False), ValueError)


def uneven(extra: dict[str, Any]) -> str:
    """What is told where ranks differ in how many a host has."""
    size = 1 if dist.get_rank() else 2
    zero, top = extra.get("zero", {}), extra.get("top", {})
    return message(lambda: engine_of(Given(), "lomo", size, zero, **top), ValueError)


class Quantizer:
    """DeepSpeed's CUDA operations of qgZ, in torch, without their packing: signed bytes."""

    Symmetric = object()

    def swizzle_quant(
        self, x: Tensor, groups: int, bits: int, kind: object, slices: int, nodes: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        assert x.dtype == torch.float16 and bits == 4 and slices == 1
        codes, scales = _quantized(x.reshape(groups, -1))
        order = torch.arange(nodes * devices).view(nodes, devices).T.flatten()
        parts = codes.view(nodes * devices, -1)[order], scales.view(nodes * devices, -1)[order]
        return parts[0].flatten(), parts[1].reshape(-1, 1)

    def quantized_reduction(
        self, q: Tensor, scales: Tensor, before: int, after: int, bits: int, kind: object, n: int
    ) -> tuple[Tensor, Tensor]:
        values = (q.view(before, -1).float() * scales).half().view(n, -1)
        total = values[0]
        for value in values[1:]:
            total = total + value
        codes, scales = _quantized(total.reshape(after, -1))
        return codes.flatten(), scales

    def dequantize(self, q: Tensor, scales: Tensor, groups: int, bits: int, kind: object) -> Tensor:
        return (q.view(groups, -1).float() * scales).half().flatten()


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.float().abs().amax(1, keepdim=True) / 8
    scale = torch.where(scale == 0, 1.0, scale)
    return (rows.float() / scale).round().clamp(-8, 7).to(torch.int8), scale


def deepspeeds(shape: tuple[int, int], hosts: int, size: int) -> dict[str, float]:
    """The error of DeepSpeed's qgZ in one gradient, and of ours: of the mean's norm."""
    ranks = hosts * size
    all_grads = [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).half()
        for rank in range(ranks)
    ]
    exact = torch.stack(all_grads).double().mean(0)
    accelerator = mock.Mock(device_count=lambda: size)
    with (
        mock.patch.object(coalesced_collectives, "quantizer_module", Quantizer()),
        mock.patch.object(coalesced_collectives, "get_accelerator", lambda: accelerator),
        mock.patch.object(groups, "get_accelerator", lambda: accelerator),
        mock.patch.object(groups, "_ALL_TO_ALL_GROUP", {}),
    ):
        made = groups._get_local_all_to_all_group()
        own = coalesced_collectives.all_to_all_quant_reduce([all_grads[dist.get_rank()]], made)[0]
    runs = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(runs, own)
    theirs = torch.cat(runs).view(shape).double() / size  # it divides by the hosts alone
    ours = rounded_mean([g.float() for g in all_grads], hosts, size)
    return {
        "theirs": float((theirs - exact).norm() / exact.norm()),
        "ours": float((ours - exact).norm() / exact.norm()),
    }
