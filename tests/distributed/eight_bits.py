"""Weights that are gathered in 8 bits (ZeRO++ qwZ): jobs of test_eight_bits.py, on real ranks.

DeepSpeed's quantizer is CUDA code. ``Quantizer`` stands for it, in torch, with its signatures.
"""

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from torch import Tensor, nn

from tests.common import by_role
from tests.common.hypers import TRAINED
from tests.common.ranks import identical, logged, whole

STEPS = 4


class Quantizer:
    """Symmetric quantization of groups to whole numbers, each by its largest magnitude."""

    Symmetric = object()

    def quantize(self, x: Tensor, groups: int, bits: int, kind: object) -> tuple[Tensor, Tensor]:
        assert x.dtype == torch.float16 and bits == 8 and kind is self.Symmetric
        rows = x.float().view(groups, -1)
        scales = rows.abs().amax(1).clamp(min=1e-12) / 127
        return (rows / scales[:, None]).round().to(torch.int8).view(x.shape), scales

    def dequantize(self, q: Tensor, scales: Tensor, groups: int, bits: int, kind: object) -> Tensor:
        assert bits == 8 and kind is self.Symmetric
        return (q.float().view(groups, -1) * scales[:, None]).half().view(q.shape)


class Given(nn.Module):
    """Its gradients are given, and differ between ranks; it notes the weights that it computes by.

    ``step`` is the number of this step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Parameter(torch.randn(48, 64))
        self.tall = nn.Parameter(torch.randn(96, 16))
        self.odd = nn.Parameter(torch.randn(9, 7))  # no multiple of 8
        self.small = nn.Parameter(torch.randn(16))  # stays gathered
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, step: int) -> Tensor:
        self.seen.append({n: p.detach().clone() for n, p in self.named_parameters()})
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        grads = [torch.randn(p.shape, generator=generator) for p in self.parameters()]
        pairs = zip(self.parameters(), grads, strict=True)
        return torch.stack([(p.float() * g).sum() for p, g in pairs]).sum()


def config(quantized: bool, persist: int = 30, **more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": persist}
    zero |= {"zero_quantized_weights": True} if quantized else {}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}


def train(rule: str, quantized: bool, **more: Any) -> dict[str, Any]:
    """Steps by given gradients -> the weights, and how far from them those of forward were."""
    model = Given()
    optimizer = by_role.of_shapes(rule, model.parameters(), TRAINED[rule])
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(quantized, **more)
    )[0]
    off = []
    for step in range(STEPS):
        exact = whole(model)
        engine.backward(engine(step))
        engine.step()
        seen = model.seen[-1]
        off.append(
            {n: float((seen[n] - p).float().norm() / p.float().norm()) for n, p in exact.items()}
        )
    after = whole(model)
    return {"after": after, "off": off, "identical": identical(after)}


def both(rule: str, more: dict[str, Any]) -> dict[str, Any]:
    """A run with weights gathered as they are, and one in 8 bits."""
    plain = train(rule, False, **more)
    with mock.patch.object(CUDAQuantizer, "quantizer_cuda_module", Quantizer()), logged() as said:
        quantized = train(rule, True, **more)
    return {"plain": plain, "quantized": quantized, "said": said}
