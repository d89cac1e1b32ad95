"""The authors' optimizers in one process, and random numbers, without a line of ds_ext.

``Authors(rule, params, **hypers)`` copies ``params`` (a list of tensors, fp32 or fp64), updates its
own ``.params`` at each ``.step(grads)`` and computes in the dtype of the parameters.
Hyper-parameters that are not given are the authors' defaults.
"""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import came_pytorch
import lomo_optim
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

LR = {"came": 2e-4}  # CAME's authors have no default


class Authors:
    """lomo_optim's LOMO and AdaLomo, transformers' Adafactor, came_pytorch's CAME.

    The authors' AdaLomo takes vectors and matrices only: other shapes are stepped by Adafactor
    with a given lr and without relative steps, which is the same algorithm.
    """

    def __init__(self, rule: str, params: list[Tensor], **hypers: Any) -> None:
        self.params = [p.detach().clone().requires_grad_() for p in params]
        if rule in LR:
            hypers = {"lr": LR[rule]} | hypers
        own, others = self.params, []
        if rule == "adalomo":
            own = [p for p in self.params if p.dim() in (1, 2)]
            others = [p for p in self.params if p.dim() not in (1, 2)]
        self.steppers: list[Callable[[dict[Tensor, Tensor]], None]] = []
        if own:
            self.steppers.append(_STEPPERS[rule](own, hypers))
        if others:
            self.steppers.append(
                _plain(
                    transformers.Adafactor, others, {"lr": 1e-3, "relative_step": False} | hypers
                )
            )

    def step(self, grads: list[Tensor]) -> None:
        """One step by the gradients of all parameters."""
        of = dict(zip(self.params, grads, strict=True))
        for stepper in self.steppers:
            stepper(of)


def _plain(optimizer_type: type, params: list[Tensor], hypers: dict[str, Any]):
    """An optimizer with the usual interface."""
    optimizer = optimizer_type(params, **hypers)

    def step(grads: dict[Tensor, Tensor]) -> None:
        for p in params:
            p.grad = grads[p].clone()
        optimizer.step()

    return step


class _Linear(nn.Module):
    """Its loss is sum(p · g), so that the gradient of p is g, to the bit."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(p.detach()) for p in params)  # same memory

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.params, grads, strict=True))


def _fused(optimizer_type: type, params: list[Tensor], hypers: dict[str, Any], **fixed: Any):
    """An optimizer of lomo_optim, which steps in backward by hooks."""
    model = _Linear(params)
    with _without_cuda(), _in_dtype(params[0].dtype):
        optimizer = optimizer_type(model, **fixed, **hypers)

    def step(grads: dict[Tensor, Tensor]) -> None:
        with _in_dtype(params[0].dtype):
            optimizer.fused_backward(model([grads[p] for p in params]), optimizer.lr)

    return step


_STEPPERS = {
    "lomo": lambda params, hypers: _fused(lomo_optim.Lomo, params, hypers),
    "adalomo": lambda params, hypers: _fused(lomo_optim.AdaLomo, params, hypers, loss_scale=None),
    "adafactor": lambda params, hypers: _plain(transformers.Adafactor, params, hypers),
    "came": lambda params, hypers: _plain(came_pytorch.CAME, params, hypers),
}


def _without_cuda():
    """lomo_optim allocates its state with .cuda(); here it stays where it is."""
    return mock.patch.object(torch.Tensor, "cuda", lambda self: self)


@contextlib.contextmanager
def _in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """lomo_optim computes in what it calls torch.float32; here that is ``dtype``."""

    class Torch:
        float32 = dtype

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with contextlib.ExitStack() as stack:
        for module in (lomo_optim.adalomo, lomo_optim.lomo):
            stack.enter_context(mock.patch.object(module, "torch", Torch()))
        yield


# Normal numbers from a counter, as ops/normal.py describes them.


def normal_numbers(stream: int, key: int, draw: int, n: int) -> NDArray[np.float32]:
    """The first ``n`` of a sequence, in numpy's unsigned integers; ``key`` is of (seed, draw)."""
    with np.errstate(over="ignore"):
        words = _lowbias32(
            np.arange(-(-n // 2), dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key)
        )
        own = np.array([(stream * 0x85EBCA77 + draw) % 2**32], dtype=np.uint32)
        words = _lowbias32(words ^ _lowbias32(own))
    return _quantiles()[words.view(np.uint16).reshape(-1)[:n]]  # little-endian: lower half first


def _lowbias32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    normal = statistics.NormalDist()
    q = np.array([normal.inv_cdf((i + 0.5) / 2**16) for i in range(2**16)])
    return (q / np.sqrt(np.mean(q**2))).astype(np.float32)
