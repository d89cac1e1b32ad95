"""LOMO, gradient descent without state. Lv et al., arXiv 2306.09782, algorithm 1."""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import NonNegative


@dataclass(frozen=True)
class LOMO:
    lr: NonNegative = 1e-3
    weight_decay: NonNegative = 0.0  # decoupled, times lr

    def keeps(self, shard):
        return {}

    def step(self, p, g, s, t, shard):
        ops.apply_(p, g, shard, lr=self.lr, weight_decay=self.weight_decay)
        yield from ()
