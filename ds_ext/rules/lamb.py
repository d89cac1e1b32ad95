"""LAMB: Adam, with its update scaled to the norm of the weights.

You et al., arXiv 1904.00962, algorithm 2, with phi(x) = x and bias correction.

    m ← EMA, by beta1, of g,  v ← EMA, by beta2, of g²
    u = m̂ / (sqrt(v̂) + eps) + weight_decay · p
    p ← p − lr · (‖p‖ / ‖u‖) · u,  the ratio 1 where either norm is 0

Norms are taken over the whole parameter, with any number of dimensions. State: ``m`` and ``v`` are
runs like the weight, known elsewhere as exp_avg and exp_avg_sq.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Fraction, NonNegative, Positive
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import Rounds, State, register


@register(paper="1904.00962", state="8/d", rounds="1", is_batched=True, is_flat=True, relative=True)
@dataclass(frozen=True)
class LAMB:
    """Adam with its update scaled to the norm of the weights (arXiv 1904.00962)."""

    lr: NonNegative = 1e-3  # relative to the norm of the weights
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay of the averages of g and of g²
    eps: Positive = 1e-6  # added to the divisor
    weight_decay: NonNegative = 0.0  # a part of the update, before its norm is taken
    bias_correction: bool = True  # divides by 1 - betas ** t
    min_coeff: NonNegative | None = None  # least norm ratio; DeepSpeed's FusedLamb: 0.01
    max_coeff: Positive | None = None  # largest norm ratio; DeepSpeed's FusedLamb: 10

    def __post_init__(self) -> None:
        low, high = self.min_coeff, self.max_coeff
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_coeff={low} is larger than max_coeff={high}: swap them.")

    def state_spec(self, shard: Shard) -> Parts:
        return {"m": Part.like(shard), "v": Part.like(shard)}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        beta1, beta2 = self.betas
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if self.bias_correction else (1, 1)
        adam = ops.RootQuotient(s["m"], s["v"], self.eps, c1, c2)
        first = ops.plus(ops.AdamStep(adam, g, beta1, beta2), p, self.weight_decay)
        u = ops.plus(adam, p, self.weight_decay)

        p_sq, u_sq = yield ops.square_sums((p, first), shard, g)
        ratio = (p_sq.sqrt() / u_sq.sqrt()).clamp(self.min_coeff or 0, self.max_coeff)
        ratio = ratio.where((p_sq > 0) & (u_sq > 0), 1.0)
        ops.apply_(p, u, shard, lr=self.lr * ratio)
