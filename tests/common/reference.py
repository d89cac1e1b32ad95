"""The authors' optimizers in one process, and random numbers, without a line of ds_ext."""

import contextlib
import functools
import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import came_pytorch
import lomo_optim
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from tests.common import models


def authors(rule: str, params: list[Tensor], **hypers: Any) -> Any:
    """lomo_optim's LOMO or AdaLomo, transformers' Adafactor, or came_pytorch's CAME.

    It computes in the dtype of the parameters, fp32 or fp64.
    """
    if rule == "lomo":
        return Fused(lomo_optim.Lomo, params, hypers)
    if rule == "adalomo":
        return AdaLomo(params, hypers)
    if rule == "adafactor":
        return transformers.Adafactor(params, **hypers)
    return came_pytorch.CAME(params, **({"lr": 2e-4} | hypers))  # CAME's authors have no default


class Fused:
    """An optimizer of lomo_optim, which steps in backward, stepped by what is in ``grad``."""

    def __init__(
        self, kind: type, params: list[Tensor], hypers: dict[str, Any], **fixed: Any
    ) -> None:
        self.params, self.model = params, models.Given(params)
        with _without_cuda(), _in_dtype(params[0].dtype):
            self.optimizer = kind(self.model, **fixed, **hypers)

    def step(self) -> None:
        with _in_dtype(self.params[0].dtype):
            loss = self.model([p.grad for p in self.params])
            self.optimizer.fused_backward(loss, self.optimizer.lr)


class AdaLomo:
    """The authors' takes vectors and matrices only.

    Adafactor with a given lr, without relative steps, is the same: it steps other shapes.
    """

    def __init__(self, params: list[Tensor], hypers: dict[str, Any]) -> None:
        own = [p for p in params if p.dim() in (1, 2)]
        others = [p for p in params if p.dim() not in (1, 2)]
        self.both = [Fused(lomo_optim.AdaLomo, own, hypers, loss_scale=None)] if own else []
        if others:
            given = {"lr": 1e-3, "relative_step": False} | hypers
            self.both.append(transformers.Adafactor(others, **given))

    def step(self) -> None:
        for each in self.both:
            each.step()


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
            np.arange(-(-n // 2), dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key % 2**32)
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
