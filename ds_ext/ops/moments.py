"""Updates by moments, as lazy expressions like the ones of ``expressions``.

``Residual``, ``AdamStep`` and ``SignStep`` advance the moments when they are read: only one pass
may read them, once.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops.expressions import (
    Readable,
    Source,
    Writable,
    inner_source_of,
    is_part,
    read,
    root,
    write_,
)
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Block

TINY = 1e-37  # numbers below may be 0 in fp32


@dataclass
class _Progress:
    """The end of the part of a run that has been read."""

    stop: int = 0

    def advance(self, b: Block) -> None:
        """Records that a block is read; earlier blocks must not be read again."""
        assert b.run.start >= self.stop, "a momentum would be advanced twice"
        self.stop = b.run.stop


@dataclass(frozen=True)
class Residual:
    """u − m, after m ← m + weight · (u − m) has advanced the momentum.

    Reading a block advances m there. Blocks must be read in order, each once; this is asserted.
    """

    u: Readable
    m: Tensor
    weight: float
    _progress: _Progress = field(default_factory=_Progress, compare=False)

    def block(self, b: Block) -> Tensor:
        self._progress.advance(b)
        u = read(self.u, b)
        m = advance_(self.m, b, u, self.weight)
        return u - m

    def source(self) -> Source | None:
        u = inner_source_of(self.u, "IS_QUOTIENT")
        return u and u.plus("IS_RESIDUAL", {"m": self.m}, lerp1=self.weight)


@dataclass(frozen=True)
class RootQuotient:
    """Adam's update (m / c1) / (sqrt(v / c2) + eps); ``c1`` and ``c2`` correct the bias.

    It is 0 where the divisor is 0.

    Example: ``ops.apply_(p, ops.RootQuotient(s["m"], s["v"], 1e-8), shard, lr=0.01)``
    """

    m: Writable
    v: Writable
    eps: float
    c1: float = 1.0
    c2: float = 1.0

    def block(self, b: Block) -> Tensor:
        return self.of(read(self.m, b), read(self.v, b))

    def of(self, m: Tensor, v: Tensor) -> Tensor:
        """The update from the given values of the moments, which it does not change."""
        a, b = self.numbers
        divisor = root(v).mul_(a).add_(b)
        is_zero = divisor == 0 if b < TINY else None
        u = torch.div(m, divisor, out=divisor)
        return u if is_zero is None else u.masked_fill_(is_zero, 0)

    def source(self) -> Source | None:
        found, (a, b) = columns(m=self.m, v=self.v), self.numbers
        return Source("IS_ADAM", found, {"a": a, "b": b}) if found and len(found) == 2 else None

    @property
    def numbers(self) -> tuple[float, float]:
        """Returns a and b of the update in the form m / (sqrt(v) · a + b)."""
        return self.c1 / self.c2**0.5, self.eps * self.c1


@dataclass(frozen=True)
class AdamStep:
    """Adam's update ``u``, after ``g`` has advanced its moments.

    Reading a block advances them there. Blocks must be read in order, each once; this is asserted.
    The update uses 8-bit moments before they are rounded: if v were rounded to 0, it would divide
    by eps alone.

    Example: ``u = ops.AdamStep(ops.RootQuotient(s["m"], s["v"], 1e-8), g, 0.9, 0.999)``
    """

    u: RootQuotient
    g: Readable
    beta1: float
    beta2: float
    _progress: _Progress = field(default_factory=_Progress, compare=False)

    def block(self, b: Block) -> Tensor:
        self._progress.advance(b)
        g = read(self.g, b)
        m = advance_(self.u.m, b, g, 1 - self.beta1)
        v = advance_(self.u.v, b, g * g, 1 - self.beta2)
        return self.u.of(m, v)

    def source(self) -> Source | None:
        g, u = inner_source_of(self.g, "IS_RUN"), self.u
        found = columns(m=u.m, v=u.v)
        if g is None or found is None:
            return None
        a, b = u.numbers
        form = "IS_ADAM8_STEP" if "m_scale" in found else "IS_ADAM_STEP"
        return g.plus(form, found, a=a, b=b, lerp1=1 - self.beta1, lerp2=1 - self.beta2)


@dataclass(frozen=True)
class SignStep:
    """Lion's update, the sign of m + (1 − beta1) · (g − m); then m ← m + (1 − beta2) · (g − m).

    Reading a block advances m there. Blocks must be read in order, each once; this is asserted.

    Example: ``ops.apply_(p, ops.SignStep(s["m"], g, 0.9, 0.99), shard, lr=0.01)``
    """

    m: Writable
    g: Readable
    beta1: float
    beta2: float
    _progress: _Progress = field(default_factory=_Progress, compare=False)

    def block(self, b: Block) -> Tensor:
        self._progress.advance(b)
        g = read(self.g, b)
        m = read(self.m, b).to(g.dtype)
        u = moved(m, g, 1 - self.beta1, torch.empty_like(g)).sign_()
        advance_(self.m, b, g, 1 - self.beta2)
        return u

    def source(self) -> Source | None:
        g, found = inner_source_of(self.g, "IS_RUN"), columns(m=self.m)
        if g is None or found is None:
            return None
        form = "IS_SIGN8_STEP" if "m_scale" in found else "IS_SIGN_STEP"
        return g.plus(form, found, lerp1=1 - self.beta1, lerp2=1 - self.beta2)


def columns(**moments: Writable) -> dict[str, Tensor | Runs] | None:
    """The tensors that store moments, by their table columns; None if no table can read one."""
    found: dict[str, Tensor | Runs] = {}
    for name, x in moments.items():
        if isinstance(x, Tensor | Runs):
            found[name] = x
        elif hasattr(x, "columns"):
            found |= x.columns(name)
        else:
            return None
    return found


def advance_(m: Writable, b: Block, x: Tensor, weight: float) -> Tensor:
    """m ← m + weight · (x − m) for a block; returns its new values before rounding."""
    values = read(m, b)
    if is_part(values, m):
        return moved(values, x, weight, values)
    values = values.to(x.dtype)
    moved(values, x, weight, values)
    write_(m, b, values)
    return values


def moved(m: Tensor, x: Tensor, weight: float, out: Tensor) -> Tensor:
    """m + weight · (x − m), all of one shape; ``out`` may be m.

    Each operation is rounded, as in native code and kernels. torch.lerp uses fused multiply-add if
    the processor has it.
    """
    change = x - m
    if weight < 0.5:
        return torch.add(m, change.mul_(weight), out=out)
    rest = 1 - weight if m.dtype == torch.float64 else float(1 - np.float32(weight))
    return torch.sub(x, change.mul_(rest), out=out)
