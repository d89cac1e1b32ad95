"""The authors' optimizers in one process with the whole model: what every run is compared with."""

import functools
import inspect
import math

import came_pytorch
import galore_torch
import numpy as np
import torch
import transformers

from ds_ext.optimizer import OPTIMIZERS
from tests.common import table
from tests.common.simulated import Formula


def ordinary(rule, groups, hypers):
    """An optimizer that steps by ``.grad``: its authors' where they have one, or its paper's.

    A rule that has none in this module is held against itself in one process.
    """
    if rule == "adalomo" or rule == "adafactor":
        return transformers.Adafactor(groups, **(hypers | {"relative_step": False}))
    if rule == "galoreadamw":
        return galore(groups, hypers)
    return OTHERS.get(rule, OPTIMIZERS[rule])(groups, **hypers)


def lomo(p, g, s, lr=1e-3, weight_decay=0.0):
    """LOMO's formula with decay by group, which its authors' code does not have."""
    return p * (1 - lr * weight_decay) - lr * g


def lamb(
    p, g, s, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, bias_correction=True,
    min_coeff=0.0, max_coeff=math.inf
):  # fmt: skip
    """Algorithm 2 of arXiv 1904.00962, with bounds of the ratio."""
    t = s["t"] = s.get("t", 0) + 1
    m = s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    v = s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g**2
    if bias_correction:
        m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    u = m / (v.sqrt() + eps) + weight_decay * p
    ratio = 1.0
    if p.norm() > 0 and u.norm() > 0:
        ratio = min(max(float(p.norm() / u.norm()), min_coeff), max_coeff)
    return p - lr * ratio * u


def sinkgd(
    p, g, s, lr=1e-3, iterations=5, alpha=0.05, eps=1e-8, weight_decay=0.0
):  # fmt: skip
    """Algorithms 3 and 4 of arXiv 2502.06742 -> the parameter after a step by ``g``."""
    x = g.view(1, -1) if g.dim() < 2 else g
    rows, cols = x.shape[-2:]
    for _ in range(iterations):
        x = x * (cols**0.5 / x.norm(dim=-1, keepdim=True).clamp(min=eps))
        x = x * (rows**0.5 / x.norm(dim=-2, keepdim=True).clamp(min=eps))
    a = lr * alpha
    return p * (1 - a * weight_decay) - a * x.view(p.shape)


def scale(
    p, g, s, lr=1e-3, norm_axis="row", momentum=0.0, eps=1e-8, weight_decay=0.0
):  # fmt: skip
    """Algorithm 1 of arXiv 2506.16659, with the layouts and the floor of its authors' code.

    With a rate for the width, as ``sinkgd``.
    """
    m = s["m"] = momentum * s.get("m", 0) + (1 - momentum) * g
    x = m.view(1, -1) if m.dim() < 2 else m
    rms = x.square().mean(dim=-1 if norm_axis == "row" else -2, keepdim=True).sqrt()
    return p * (1 - lr * weight_decay) - lr * (x / rms.clamp(min=eps)).view(p.shape)


def lion(p, g, s, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, nbits=32):
    """Algorithm 2 of arXiv 2302.06675; with 8 bits the momentum is rounded after the step."""
    m = s.get("m", torch.zeros_like(g))
    s["m"] = betas[1] * m + (1 - betas[1]) * g
    s["m"] = rounded(s["m"], True) if nbits == 8 else s["m"]
    c = betas[0] * m + (1 - betas[0]) * g
    return p * (1 - lr * weight_decay) - lr * c.sign()


def flashadamw(p, g, s, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
    """AdamW with moments that are rounded to 8 bits after the step."""
    t = s["t"] = s.get("t", 0) + 1
    m = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
    v = betas[1] * s.get("v", 0) + (1 - betas[1]) * g**2
    s["m"], s["v"] = rounded(m, True), rounded(v, False)
    u = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p * (1 - lr * weight_decay) - lr * u


def divisor(g, s, name, beta, eps):
    """sqrt(v), by Adafactor's statistics of a matrix or the second moment of a vector, in ``s``."""
    square = g * g + eps
    if g.dim() < 2:
        s[name] = beta * s.get(name, 0) + (1 - beta) * square
        return s[name].sqrt()
    row, col = (
        beta * s.get((name, dim), 0) + (1 - beta) * square.mean(dim, keepdim=True)
        for dim in (-1, -2)
    )
    s[name, -1], s[name, -2] = row, col
    return (row * col / row.mean(-2, keepdim=True)).sqrt()


def came(
    p, g, s, lr=2e-4, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16), weight_decay=0.0, nbits=8
):  # fmt: skip
    """Algorithm 2 of arXiv 2307.02047 with a momentum that is rounded before it is used."""
    u = g / divisor(g, s, "v", betas[1], eps[0])
    u = u / u.square().mean().sqrt().clamp(min=1)
    m = s["m"] = rounded(betas[0] * s.get("m", 0) + (1 - betas[0]) * u, True)
    if g.dim() > 1:
        m = m / divisor(u - m, s, "r", betas[2], eps[1])
    return p * (1 - lr * weight_decay) - lr * m


def adafactor(p, g, s, lr, beta1, weight_decay=0.0, relative_step=False, nbits=8):
    """Algorithm 4 of arXiv 1804.04235 with a momentum that is rounded before it is used."""
    t = s["t"] = s.get("t", 0) + 1
    u = g / divisor(g, s, "v", 1 - t**-0.8, 1e-30)
    u = u / u.square().mean().sqrt().clamp(min=1)
    alpha = lr * p.square().mean().sqrt().clamp(min=1e-3)
    m = s["m"] = rounded(beta1 * s.get("m", 0) + (1 - beta1) * alpha * u, True)
    return p * (1 - alpha * weight_decay) - m


def by_formula(formula, before, steps, **hypers):
    """The parameters after the gradients of ``steps`` by a formula of this module."""
    params, states = list(before), [{} for _ in before]
    for grads in steps:
        found = zip(params, grads, states, strict=True)
        params = [formula(p, g, s, **hypers) for p, g, s in found]
    return params


def of_paper(rule, formula, settings, shapes, steps):
    """The ``Formula`` of a rule that a formula of this module computes."""

    @functools.cache
    def expected(setting, shapes):
        before, grads = table.weights(shapes), table.gradients(steps, shapes)
        return by_formula(formula, before, grads, **settings[setting])

    def made(setting):
        return rule(**settings[setting])

    return Formula(made, expected, settings, shapes, steps)


class InFP64(torch.optim.Optimizer):
    """Steps by a formula of a weight, its gradient and state, in fp64."""

    def __init__(self, formula, groups, **hypers):
        keys = inspect.signature(formula).parameters.values()
        defaults = {key.name: key.default for key in keys if key.default is not key.empty}
        super().__init__(groups, defaults | hypers)
        self.formula, self.names = formula, [*defaults | hypers]  # torch adds other defaults

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            hypers = {key: group[key] for key in self.names}
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.formula(p.double(), p.grad.double(), self.state[p], **hypers))


def galore(groups, hypers):
    """galore_torch's optimizer, low-rank for the matrices and plain AdamW for the rest."""
    keys = {"rank": hypers["rank"], "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    split = []
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim == 2]
        others = [p for p in group["params"] if p.ndim != 2]
        split.append({**group, "params": matrices, **keys})
        split.append({**group, "params": others})
    return galore_torch.GaLoreAdamW([g for g in split if g["params"]], lr=hypers["lr"])


FORMULAS = {"lomo": lomo, "lamb": lamb, "sinkgd": sinkgd, "scale": scale, "lion": lion}
FORMULAS |= {"flashadamw": flashadamw}
OTHERS = {"came": came_pytorch.CAME, "adamw": torch.optim.AdamW}
OTHERS |= {rule: functools.partial(InFP64, formula) for rule, formula in FORMULAS.items()}
INDEPENDENT = {"adalomo", "adafactor", "galoreadamw", *OTHERS}  # rules that have a reference here


# Moments of 8 bits as arXiv 2602.23349 rounds them, written out in NumPy. They are decoded in fp32,
# as everywhere: a last bit that differs there would be another code now and then.


def scale_of(x):
    """A positive number rounded to 11 significant bits, within the scales that there are."""
    x = np.float32(min(max(float(x), 2.0**-44), 2.0**20 - 2.0**9))
    spacing = 2.0 ** (math.frexp(x)[1] - 11)
    return np.float32(np.round(x / spacing) * spacing)


def rounded(x, signed):
    """Values as they come back from 8 bits, group by group."""
    flat, out = x.flatten().numpy(), []
    for at in range(0, x.numel(), 32):
        group = flat[at : at + 32] if signed else np.sqrt(flat[at : at + 32])
        most = max(float(np.abs(group).max()), 2.0**-44)
        scale, part = scale_of(most), group / most
        if signed:
            y = 2 * part / (1 + np.abs(part))
            code = np.floor(127 * y + 0.5).astype(np.float32)
            out.append(code / (254 - np.abs(code)) * scale)
        else:
            code = np.floor(255 * part + 0.5).astype(np.float32)
            out.append((code * (scale / np.float32(255))) ** 2)
    return torch.from_numpy(np.concatenate(out)).to(x.dtype).view(x.shape) if out else x
