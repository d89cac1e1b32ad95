"""Adam's moments of a flat run, kept in 32 bits or quantized to 8, and the step by them.

    m ← EMA, by beta1, of g,  v ← EMA, by beta2, of g²,  u = m / (sqrt(v) + eps)

Bias correction is a factor on u, as in the authors' code of GaLore: eps is added to the root of
the uncorrected v.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from ds_ext import ops
from ds_ext.ops import quantize
from ds_ext.ops.shard import Shard, outward
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import Kept, Sums

# The update, the weight that it is for, and the geometry of both, flat.
Step: TypeAlias = tuple[ops.AdamStep, ops.Writable, Shard]


@dataclass(frozen=True)
class Adam:
    """Adam on flat runs; 8-bit moments are those of whole blocks of 256 of the whole parameter."""

    betas: tuple[float, float]
    eps: float
    nbits: int = 32
    min_8bit_size: int = 4096  # fewer moments than these stay fp32

    def correction(self, t: int) -> float:
        """What an update of step ``t`` is multiplied by to correct the moments' bias."""
        beta1, beta2 = self.betas
        return float((1 - beta2**t) ** 0.5 / (1 - beta1**t))

    def unit(self, total: int) -> int:
        """Elements, of ``total``, whose moments are kept together: a block of 8-bit ones."""
        is_quantized = self.nbits == 8 and total >= self.min_8bit_size
        return quantize.SIZE if is_quantized else 1

    def keeps(self, run: slice, total: int) -> dict[str, Part | Parts]:
        """The moments of the elements ``run`` of ``total``."""
        part = quantize.keeps if self.unit(total) > 1 else Part.of
        return {"m": part(run, total), "v": part(run, total)}

    def keeps_of(self, shard: Shard) -> dict[str, Part | Parts]:
        """The moments of a parameter's run, outward to whole blocks where they are quantized."""
        total = shard.numel
        return self.keeps(outward(shard.start, shard.stop, self.unit(total), total), total)

    def advance(self, s: Kept, g: ops.Readable) -> ops.AdamStep:
        """The update by a flat run ``g``; its blocks advance the moments and are read once."""
        m, v = s["m"], s["v"]
        if isinstance(m, dict):
            m, v = quantize.Quantized(m, signed=True), quantize.Quantized(v, signed=False)
        return ops.AdamStep(ops.RootQuotient(m, v, self.eps), g, *self.betas)

    def step(
        self, p: ops.Writable, g: ops.Gradient, s: Kept, shard: Shard
    ) -> Generator[Sums, Sums, Step]:
        """The step of a whole run, completed to blocks in one round if cuts go through some."""
        if self.unit(shard.numel) > 1:
            before, after = yield from quantize.complete(g, shard)
            n = len(shard)
            whole = Shard.whole((len(before) + n + len(after),))
            update = self.advance(s, ops.Extended(before, g, n, after))  # g is read alone
            return update, ops.Extended(before, p, n, after), whole
        return self.advance(s, g), p, Shard.whole((len(shard),))
