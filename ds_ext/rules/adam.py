"""Adam's moments of a flat run, stored in fp32 or in fewer bits, and Adam's update.

    m ← EMA, by beta1, of g,  v ← EMA, by beta2, of g²,  u = (m / c1) / (sqrt(v / c2) + eps)

``c1`` and ``c2`` correct the bias of the moments before eps is added. GaLore's authors multiply u
by a factor instead.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from ds_ext import ops
from ds_ext.ops import formats, quantize
from ds_ext.ops.formats import PLAIN, Format
from ds_ext.ops.shard import Shard, outward
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import State, Sums

# An update, the weight to update, and the geometry of both.
AdamUpdate: TypeAlias = tuple[ops.AdamStep, ops.Writable, Shard]
Formats: TypeAlias = tuple[Format, Format]


@dataclass(frozen=True)
class Adam:
    """Adam on flat runs. Moments with shared scales are stored in whole groups of the parameter."""

    betas: tuple[float, float]
    eps: float
    formats: Formats = (PLAIN, PLAIN)  # formats of m and v, with equal group sizes
    least: int = 0  # parameters with fewer moments keep fp32

    @classmethod
    def of_bits(cls, betas: tuple[float, float], eps: float, nbits: int, least: int) -> "Adam":
        """Returns Adam with 32-bit moments, or bitsandbytes' 8 bits from ``least`` moments on."""
        return cls(betas, eps) if nbits == 32 else cls(betas, eps, quantize.MOMENTS, least)

    def biases(self, t: int) -> tuple[float, float]:
        """Returns the divisors that correct the bias of m and v at step ``t``."""
        beta1, beta2 = self.betas
        return 1 - beta1**t, 1 - beta2**t

    def correction(self, t: int) -> float:
        """Returns bias correction as a factor, for rules that add eps to the uncorrected root."""
        c1, c2 = self.biases(t)
        return float(c2**0.5 / c1)

    def unit(self, total: int) -> int:
        """Returns the number of elements in a group of moments, for ``total`` moments."""
        return self._formats(total)[0].size

    def state_spec(self, run: slice, total: int) -> dict[str, Part | Parts]:
        """Returns the moments of the elements ``run`` out of ``total``."""
        m, v = self._formats(total)
        return {"m": m.state_spec(run, total), "v": v.state_spec(run, total)}

    def shard_state_spec(self, shard: Shard) -> dict[str, Part | Parts]:
        """Returns the moments of a parameter's run, extended to whole groups."""
        total = shard.numel
        return self.state_spec(outward(shard.start, shard.stop, self.unit(total), total), total)

    def advance(
        self, s: State, g: ops.Readable, total: int, c1: float = 1.0, c2: float = 1.0
    ) -> ops.AdamStep:
        """Returns the update from a run ``g``. Reading a block, once, advances its moments."""
        m, v = (x.opened(s[key]) for x, key in zip(self._formats(total), ("m", "v"), strict=True))
        return ops.AdamStep(ops.RootQuotient(m, v, self.eps, c1, c2), g, *self.betas)

    def step(
        self,
        p: ops.Writable,
        g: ops.Gradient,
        s: State,
        shard: Shard,
        c1: float = 1.0,
        c2: float = 1.0,
    ) -> Generator[Sums, Sums, AdamUpdate]:
        """Returns the step of a run. If a cut splits a group, one round completes the group."""
        total = shard.numel
        p, x, whole = yield from formats.whole_groups(p, g, shard, self.unit(total))
        return self.advance(s, x, total, c1, c2), p, whole

    def _formats(self, total: int) -> Formats:
        return self.formats if not self.least or total >= self.least else (PLAIN, PLAIN)
