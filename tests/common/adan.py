"""A rule that ds_ext does not have, written as docs/adding-an-optimizer.md says: Adan."""

from dataclasses import dataclass

import torch

from ds_ext import ops
from ds_ext.hyperparams import Fraction, NonNegative, Positive
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import REGISTRY, Rounds, State, register

NAME = "adan"


def enter() -> None:
    """Registers the rule. Native code and kernels have no form for two of its updates."""

    @register(paper="2208.06677", state="16", rounds="1")
    @dataclass(frozen=True)
    class Adan:
        """θ ← (1 − lr·wd) θ − lr · (m + (1 − β2) v) / (√n + ε), within a trust ratio.

        Algorithm 1 of the paper, with decoupled decay. The ratio uses each operation that a rule
        may use on a scalar.
        """

        lr: NonNegative = 1e-3
        betas: tuple[Fraction, Fraction, Fraction] = (0.98, 0.92, 0.99)
        eps: Positive = 1e-8
        weight_decay: NonNegative = 0.0

        def state_spec(self, shard: Shard) -> Parts:
            return {name: Part.like(shard) for name in ("m", "v", "n", "prev")}

        def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
            beta1, beta2, beta3 = self.betas
            (p_sq,) = yield (ops.square_sum(p, shard, g),)
            change = ops.Sum(g, s["prev"], -1.0)
            ops.lerp_(s["m"], g, 1 - beta1, shard)
            if t > 1:
                ops.lerp_(s["v"], change, 1 - beta2, shard)
            ops.square_lerp_(
                s["n"], ops.Sum(g, change, beta2 if t > 1 else 0.0), 0.0, 1 - beta3, shard
            )
            ops.lerp_(s["prev"], g, 1.0, shard)
            u = ops.RootQuotient(ops.Sum(s["m"], s["v"], beta2), s["n"], self.eps)
            alpha = self.lr * ratio(shard.rms(p_sq))
            ops.apply_(p, u, shard, lr=alpha, weight_decay=self.weight_decay)


def leave() -> None:
    del REGISTRY[NAME]


def ratio(rms):
    """A number near 1 that takes + - * / ** sqrt abs < min and max of its argument."""
    x = abs(1.5 - rms) + rms**2 / (1 + rms.sqrt()) - rms**-1 * 0.01
    return x.where(x < 3.0, 3.0).clamp(min=0.5, max=2.0)


def reference(p, grads, lr, betas, eps, weight_decay):
    """The same in fp64, as the paper writes it, of a whole parameter."""
    beta1, beta2, beta3 = betas
    p = p.double()
    m, v, n, before = (torch.zeros_like(p) for _ in range(4))
    for t, g in enumerate(grads):
        g = g.double()
        alpha = lr * ratio(p.square().mean().sqrt())
        change = g - before if t else torch.zeros_like(g)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * change
        n = beta3 * n + (1 - beta3) * (g + beta2 * change).square()
        before = g
        p = p - alpha * ((m + beta2 * v) / (n.sqrt() + eps) + weight_decay * p)
    return p
