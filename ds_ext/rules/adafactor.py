"""Adafactor. Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5, as in transformers.Adafactor.

With ``beta1`` the momentum is that of the update already scaled by the learning rate, as in
transformers and unlike the paper. Leading dimensions of a tensor with more than two are separate
matrices; RMS is taken over all.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Fraction, Negative, NonNegative, Positive
from ds_ext.ops.state import Part
from ds_ext.rules import factored


@dataclass(frozen=True)
class Adafactor:
    lr: NonNegative | None = None  # only with relative_step=False
    eps: tuple[NonNegative, NonNegative] = (1e-30, 1e-3)  # added to g², least RMS(p)
    clip_threshold: Positive = 1.0  # largest RMS of the update
    decay_rate: Negative = -0.8
    beta1: Fraction | None = None  # momentum; None keeps none
    weight_decay: NonNegative = 0.0  # decoupled, times the step size
    scale_parameter: bool = True  # step size relative to RMS(p)
    relative_step: bool = True  # step size from t alone
    warmup_init: bool = False  # relative step size grows from 1e-6

    def __post_init__(self):
        if self.relative_step and self.lr is not None:
            raise ValueError(
                f"lr={self.lr} and relative_step=true exclude each other: with relative_step the "
                "step size comes from the step count. Set relative_step to false to use lr."
            )
        if not self.relative_step and self.lr is None:
            raise ValueError("lr is missing: relative_step=false takes the step size from lr.")
        if self.warmup_init and not self.relative_step:
            raise ValueError("warmup_init=true needs relative_step=true.")

    def keeps(self, shard):
        s = {"v": factored.keeps(shard)}
        return s if self.beta1 is None else s | {"m": Part.like(shard)}

    def step(self, p, g, s, t, shard):
        eps1, eps2 = self.eps
        beta2 = 1 - t**self.decay_rate
        u, (p_sq,) = yield from factored.normalize(
            g, s["v"], eps1, beta2, self.clip_threshold, shard, ops.square_sum(p, shard, g)
        )
        alpha = self.step_size(t)
        if self.scale_parameter:
            alpha = alpha * shard.rms(p_sq).clamp(min=eps2)
        if self.beta1 is None:
            ops.apply_(p, u, shard, lr=alpha, weight_decay=self.weight_decay)
        else:  # m is of updates that alpha is a factor of already
            ops.lerp_(s["m"], u.times(alpha), 1 - self.beta1, shard)
            ops.apply_(p, s["m"], shard, lr=1, weight_decay=alpha * self.weight_decay)

    def step_size(self, t):
        if not self.relative_step:
            return self.lr
        return min(1e-6 * t if self.warmup_init else 1e-2, t**-0.5)
