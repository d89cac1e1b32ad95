"""Adam's moments of a flat run, stored in fp32 or in fewer bits, and Adam's update.

    m ← EMA, by beta1, of g,  v ← EMA, by beta2, of g²,  u = (m / c1) / (sqrt(v / c2) + eps)

``c1`` and ``c2`` correct the bias of the moments before eps is added. GaLore's authors multiply u
by a factor instead.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from ds_ext import ops
from ds_ext.ops import companding, formats
from ds_ext.ops.formats import PLAIN, Format
from ds_ext.ops.shard import Shard, outward
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import State, Sums

# An update, the weight to update, and the geometry of both.
AdamUpdate: TypeAlias = tuple[ops.AdamStep, ops.Writable, Shard]
Formats: TypeAlias = tuple[Format, Format]
EIGHT_BITS: Formats = companding.MOMENT, companding.SQUARES


@dataclass(frozen=True)
class Adam:
    """Adam on flat runs. Moments with shared scales are stored in whole groups of the parameter."""

    betas: tuple[float, float]
    eps: float
    formats: Formats = (PLAIN, PLAIN)  # formats of m and v, with equal group sizes

    @classmethod
    def of_bits(cls, betas: tuple[float, float], eps: float, nbits: int) -> "Adam":
        """Returns Adam with moments of 32 or 8 bits."""
        return cls(betas, eps, EIGHT_BITS if nbits == 8 else (PLAIN, PLAIN))

    def biases(self, t: int) -> tuple[float, float]:
        """Returns the divisors that correct the bias of m and v at step ``t``."""
        beta1, beta2 = self.betas
        return 1 - beta1**t, 1 - beta2**t

    def correction(self, t: int) -> float:
        """Returns bias correction as a factor, for rules that add eps to the uncorrected root."""
        c1, c2 = self.biases(t)
        return float(c2**0.5 / c1)

    @property
    def unit(self) -> int:
        """The number of elements in a group of moments."""
        return self.formats[0].size

    def state_spec(self, run: slice, total: int) -> dict[str, Part | Parts]:
        """Returns the moments of the elements ``run`` out of ``total``."""
        m, v = self.formats
        return {"m": m.state_spec(run, total), "v": v.state_spec(run, total)}

    def shard_state_spec(self, shard: Shard) -> dict[str, Part | Parts]:
        """Returns the moments of a parameter's run, extended to whole groups."""
        total = shard.numel
        return self.state_spec(outward(shard.start, shard.stop, self.unit, total), total)

    def advance(self, s: State, g: ops.Readable, c1: float = 1.0, c2: float = 1.0) -> ops.AdamStep:
        """Returns the update from a run ``g``. Reading a block, once, advances its moments."""
        m, v = (x.opened(s[key]) for x, key in zip(self.formats, ("m", "v"), strict=True))
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
        p, x, whole = yield from formats.whole_groups(p, g, shard, self.unit)
        return self.advance(s, x, c1, c2), p, whole
