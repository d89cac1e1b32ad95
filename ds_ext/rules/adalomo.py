"""AdaLomo: Adafactor's update, its size relative to the weights'. Lv et al., arXiv 2310.10195,
algorithm 1, with the decay of the second moment of the authors' code: beta2 = 1 - t**decay_rate.

Leading dimensions of a tensor with more than two are separate matrices; RMS is taken over all.
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Negative, NonNegative, Positive
from ds_ext.rules import factored


@dataclass(frozen=True)
class AdaLomo:
    lr: NonNegative = 1e-3  # relative to RMS(p); the authors fine-tune with 5e-4
    eps: tuple[NonNegative, NonNegative] = (1e-30, 1e-3)  # added to g², least RMS(p)
    clip_threshold: Positive = 1.0  # largest RMS of the update
    decay_rate: Negative = -0.8
    weight_decay: NonNegative = 0.0  # decoupled, times lr · RMS(p)

    def keeps(self, shard):
        return {"v": factored.keeps(shard)}

    def step(self, p, g, s, t, shard):
        eps1, eps2 = self.eps
        beta2 = 1 - t**self.decay_rate
        u, (p_sq,) = yield from factored.normalize(
            g, s["v"], eps1, beta2, self.clip_threshold, shard, ops.square_sum(p, shard, g)
        )
        alpha = self.lr * shard.rms(p_sq).clamp(min=eps2)
        ops.apply_(p, u, shard, lr=alpha, weight_decay=self.weight_decay)
