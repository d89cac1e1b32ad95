"""The optimizers to compare with: one process, whole parameters, no line shared with ds_ext.

``Authors(rule, params, **hypers)`` is the code of an algorithm's authors, and
``Textbook(rule, params, **hypers)`` the formulas of docs/algorithms.md in plain torch. Both copy
``params`` (a list of tensors, fp32 or fp64), update their own ``.params`` at each ``.step(grads)``
and compute in the dtype of the parameters. Hyper-parameters that are not given are the authors'
defaults in the first and those of docs/algorithms.md in the second.
"""

import contextlib
import functools
import math
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


class Textbook:
    """The formulas of docs/algorithms.md on whole tensors."""

    def __init__(self, rule: str, params: list[Tensor], **hypers: Any) -> None:
        self.params = [p.detach().clone() for p in params]
        self.states: list[dict[str, Any]] = [{} for _ in params]
        self.rule, self.hypers, self.t = _FORMULAS[rule], hypers, 0

    def step(self, grads: list[Tensor]) -> None:
        """One step by the gradients of all parameters."""
        self.t += 1
        for i, (g, s) in enumerate(zip(grads, self.states, strict=True)):
            self.params[i] = self.rule(self.params[i], g, s, self.t, **self.hypers)


def _lomo(p, g, s, t, lr=1e-3, weight_decay=0.0):
    return p * (1 - lr * weight_decay) - lr * g


def _adalomo(
    p, g, s, t, lr=1e-3, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, weight_decay=0.0
):
    u = _clip(g / _factored(s, "v", g**2 + eps[0], 1 - t**decay_rate).sqrt(), clip_threshold)
    alpha = lr * max(eps[1], _rms(p))
    return p * (1 - alpha * weight_decay) - alpha * u


def _adafactor(
    p,
    g,
    s,
    t,
    lr=None,
    eps=(1e-30, 1e-3),
    clip_threshold=1.0,
    decay_rate=-0.8,
    beta1=None,
    weight_decay=0.0,
    scale_parameter=True,
    relative_step=True,
    warmup_init=False,
):
    u = _clip(g / _factored(s, "v", g**2 + eps[0], 1 - t**decay_rate).sqrt(), clip_threshold)
    if relative_step:
        lr = min(1e-6 * t if warmup_init else 1e-2, 1 / math.sqrt(t))
    alpha = lr * max(eps[1], _rms(p)) if scale_parameter else lr
    u = alpha * u
    if beta1 is not None:
        u = s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * u
    return p * (1 - alpha * weight_decay) - u


def _came(
    p,
    g,
    s,
    t,
    lr=2e-4,
    betas=(0.9, 0.999, 0.9999),
    eps=(1e-30, 1e-16),
    clip_threshold=1.0,
    weight_decay=0.0,
):
    u = _clip(g / _factored(s, "v", g**2 + eps[0], betas[1]).sqrt(), clip_threshold)
    m = s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * u
    if p.dim() > 1:
        m = m / _factored(s, "r", (u - m) ** 2 + eps[1], betas[2]).sqrt()
    return p * (1 - lr * weight_decay) - lr * m


_FORMULAS = {"lomo": _lomo, "adalomo": _adalomo, "adafactor": _adafactor, "came": _came}


def _factored(s: dict[str, Any], name: str, square: Tensor, beta: float) -> Tensor:
    """The running mean of ``square``: of rank one for the last two dimensions, if there are two."""

    def mean(key, new):
        s[name + key] = beta * s.get(name + key, 0) + (1 - beta) * new
        return s[name + key]

    if square.dim() < 2:
        return mean("", square)
    row, col = mean("row", square.mean(-1)), mean("col", square.mean(-2))
    return row[..., :, None] * col[..., None, :] / row.mean(-1)[..., None, None]


def _rms(x: Tensor) -> Tensor:
    return (x**2).mean().sqrt()


def _clip(u: Tensor, threshold: float) -> Tensor:
    return u / max(1, _rms(u) / threshold)


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
