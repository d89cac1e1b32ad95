"""Muon: steps by a momentum with all singular values brought near 1.

K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with the settings
of torch.optim.Muon: weight decay and the two scales of Liu et al., arXiv 2502.16982.

    m ← EMA, by momentum, of g,  x = g + momentum · (m − g), or m without Nesterov
    X = x / ‖x‖;  ns_steps times, on the short side:  A = X·Xᵀ,  X ← (a·I + b·A + c·A²)·X
    p ← p (1 − lr · weight_decay) − lr · scale · X

NorMuon (Li et al., arXiv 2510.05491, as in the authors' code) is Muon with ``beta2``:

    v ← EMA, by beta2, of each row's mean of X²,  Y = X with each row divided by sqrt(v)
    X ← Y · ‖X‖ / ‖Y‖

State: ``m`` is a run like the weight, in fp32 or in 8 bits (``ops.companding``). The update uses m
before it is rounded. ``v`` is a number per row. Communication of a step:
  x       Where ranks share a matrix, one of them gets all of x, iterates, and sends the ranks their
          runs of X. A rank thus sends 8 bytes per element of its runs, and has whole matrices only
          of its turns. The ranks share the matrices of a bucket by the cost of their iterations.
  beta2   One round of a number per row.
  nbits 8 One round where a cut splits 32 elements: ``ops.companding``.
The update is that of one process, except for the order of additions in products of several matrices
(``ops.joint``) and in the sums of ``beta2``.

``ns_dtype`` is the dtype of products; sums and X are fp32 (all are fp64 for fp64 parameters). For
the spectra in the tests, the update is within 1e-2 of the fp64 iteration with "bf16", and within
1e-3 with "fp32". torch's bf16 is off by 1e-2 to 1. CPUs, and GPUs without fast bf16 products,
multiply fp32 numbers.
"""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from ds_ext import ops
from ds_ext.hyperparams import (
    Adjustment,
    Bits,
    Coefficients,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Precision,
)
from ds_ext.ops import exchange, formats, joint
from ds_ext.ops.companding import of_bits
from ds_ext.ops.joint import Joint
from ds_ext.ops.shard import Block, Shard, outward
from ds_ext.ops.state import Part, Parts
from ds_ext.rules import newton_schulz
from ds_ext.rules.base import Rounds, State, Sums, register
from ds_ext.rules.newton_schulz import steps_of

TINY = 1e-10  # added to roots that divide
TERMS = {"bf16": 1, "fp32": 3}  # by ``ns_dtype``, the bf16 terms of a product's operand


@register(
    paper="2502.16982",
    state="4/d; 1.06/d with 8-bit momentum",
    rounds="2 all-to-alls; 1 more each where a cut goes through 32 elements of 8-bit momentum, and "
    "with beta2",
    others={"type": "AdamW"},
    has_sections=True,
    shared_work=lambda rule, shard: rule.operations(shard),
)
@dataclass(frozen=True)
class Muon:
    """Momentum with all singular values near 1 (arXiv 2502.16982)."""

    lr: NonNegative = 1e-3  # learning rate
    momentum: Fraction = 0.95  # decay of the average of g
    nesterov: bool = True  # steps by g and the average together
    weight_decay: NonNegative = 0.1  # decoupled, times lr
    # of each step; a single triple, or the last of a list, serves all further steps
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315)
    ns_steps: Count = 5  # steps of the Newton-Schulz iteration
    ns_dtype: Precision = "bf16"  # of its matrix products; sums are fp32
    eps: Positive = 1e-7  # least norm
    # lr's factor: sqrt(max(1, rows / cols)), or 0.2 · sqrt(max(rows, cols))
    adjust_lr_fn: Adjustment = "original"
    # NorMuon: divides rows by an RMS that decays at this rate; null: Muon
    beta2: Fraction | None = None
    nbits: Bits = 32  # bits of a moment's element

    def state_spec(self, shard: Shard) -> Parts:
        m = formats.state_spec(of_bits(self.nbits), shard)
        own = Part.of(slice(0, shard.rows if len(shard) else 0), shard.rows)
        v = Part.whole(shard.rows) if shard.is_cut else own  # who holds it whole advances it alone
        return {"m": m} if self.beta2 is None else {"m": m, "v": v}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        x = yield from self.moved(p, g, s, shard)
        if not shard.is_cut and not len(shard):
            return  # another rank holds the whole matrix, and needs no sums
        whole = yield from exchange.collect(x, shard)
        if whole is not None:
            (whole,) = yield Joint(self.orthogonalized, whole)
        x = yield from exchange.distribute(whole, shard, x)
        u = x if self.beta2 is None else (yield from self.normalized(x, s["v"], shard))
        u = ops.times(u, self.scale(shard))
        yield from joint.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    def moved(
        self, p: ops.Writable, g: ops.Gradient, s: State, shard: Shard
    ) -> Generator[Sums, Sums, Tensor]:
        """Advances the momentum; returns x, [len(shard)]."""
        if self.nbits == 32:
            x = yield from joint.momentum(s["m"], g, shard, self.momentum, self.nesterov)
            if x is not None:
                return x
        stored, start = of_bits(self.nbits), shard.start
        size = stored.size
        _, runs, whole = yield from formats.whole_groups(p, g, shard, size)
        momentum = _Momentum(stored.opened(s["m"]), runs, self.momentum, self.nesterov)
        x = ops.evaluate(momentum, whole, g)
        before = start - outward(start, shard.stop, size, shard.numel).start
        return x[before : before + len(shard)]

    def normalized(self, u: Tensor, v: Tensor, shard: Shard) -> Generator[Sums, Sums, ops.Readable]:
        """Returns an update whose rows are divided by ``v``, scaled to the norm of ``u``."""
        assert self.beta2 is not None
        sums = ops.row_col_square_sums(u, shard, u)[0].view(-1)
        if shard.is_cut:
            (sums,) = yield (sums,)
        v.lerp_(sums / shard.cols, 1 - self.beta2)
        row = 1 / (v.sqrt() + TINY)
        norm = (sums * row.square()).sum().sqrt()
        row = row * (sums.sum().sqrt() / (norm + TINY))
        return ops.Quotient(u, row.view(1, -1, 1), row.new_ones(1, 1, shard.cols))

    def orthogonalized(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the last X of matrices, [n, rows, cols]: a joint operation."""
        terms = TERMS[self.ns_dtype]
        return (newton_schulz.orthogonalized(x, self.coefficients, self.eps, terms),)

    def operations(self, shard: Shard) -> float:
        """Returns the multiplications of the rank that iterates on a matrix."""
        short, long = sorted((shard.rows, shard.cols))
        return self.ns_steps * short**2 * (1.5 * long + 0.5 * short)

    @property
    def coefficients(self) -> list[tuple[float, float, float]]:
        """The coefficients of each step of the iteration."""
        return steps_of(self.ns_coefficients, self.ns_steps)

    def scale(self, shard: Shard) -> float:
        """Returns the factor of an update for the shape of its matrix."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return float(0.2 * max(shard.rows, shard.cols) ** 0.5)
        return float(max(1, shard.rows / shard.cols) ** 0.5)


@dataclass(frozen=True)
class _Momentum:
    """x of a run ``g``. Reading a block, once, advances ``m``, and uses it before it is rounded."""

    m: ops.Writable
    g: ops.Readable
    momentum: float
    nesterov: bool

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols]. The caller may overwrite them."""
        g = ops.read(self.g, b)
        m = ops.advance_(self.m, b, g, 1 - self.momentum)
        return g.lerp(m, self.momentum) if self.nesterov else m.clone()
