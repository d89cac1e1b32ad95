"""GaLore-AdamW: Adam on gradients projected to ``rank`` dimensions.

Zhao et al., arXiv 2403.03507, algorithm 2, as in the authors' galore_torch: bias correction and
eps as in its AdamW (eps is added to the uncorrected root), weight decay after the update. A renewed
basis keeps the moments, and the short side limits the rank. Unlike in the authors' code, the signs
of basis vectors are deterministic.

    Q = the leading ``rank`` singular vectors of g's side, renewed each update_proj_gap steps
    R = g · Qᵀ (right) or Qᵀ · g (left)
    m ← EMA, by beta1, of R,  v ← EMA, by beta2, of R²
    N = c · m / (sqrt(v) + eps),  c = sqrt(1 − beta2^t) / (1 − beta1^t)
    p ← p − lr · scale · (N · Q, or Q · N),  p ← p (1 − lr · weight_decay)

State: ``m`` and ``v`` are the authors' exp_avg and exp_avg_sq of R; ``q`` is their projector's
ortho_matrix.

The shape of the whole matrix selects the side: with ``std``, right if rows >= cols, else left.
Bytes on one of d ranks in addition to its run, with rank r:
  right, R = G·V [rows, r]    basis 4·r·cols, replicated;  moments 8·r·rows / d (+ a row)
  left, R = U'·G [r, cols]    basis 4·r·rows / d (+ a row); moments 8·r·cols / d
8-bit moments take 1/4, plus up to 510 elements: blocks of 256 are blocks of the whole moment, so
that rounding does not depend on the number of ranks.

A step takes one round (right) or two (left). Renewing the basis takes one more round for every
2**20 elements of the gradient, and 1 or 2 others. AdamW steps vectors, tensors of more than two
dimensions, and groups with rank null: moments 8·numel / d, and no rounds (with 8 bits one round, if
a cut splits a block).
"""

import functools
from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Bits, Count, Fraction, NonNegative, Positive, Side, Size
from ds_ext.ops import joint, quantize
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.rules import lowrank
from ds_ext.rules.adam import Adam
from ds_ext.rules.base import Rounds, State, register


@register(
    paper="2403.03507",
    state="about 8·r/(S·d) for moments + 4·r/L for a replicated basis, r the rank, S and L the "
    "short and the long side; 2 instead of 8 with 8-bit moments",
    rounds="1–2, more when the basis is renewed",
    others={"rank": None},
    shared_work=lambda rule, shard: min(shard.rows, shard.cols) ** 3 * rule.projects(shard),
)
@dataclass(frozen=True)
class GaLoreAdamW:
    """AdamW on gradients projected to a low rank (arXiv 2403.03507).

    Plain AdamW steps groups with ``rank=None``, and parameters that are not matrices.
    """

    lr: NonNegative = 1e-3  # learning rate
    rank: Count | None = 128  # dimensions of the projected gradient; null: plain AdamW
    update_proj_gap: Count = 200  # steps between renewals of the basis
    scale: Positive = 0.25  # of a projected update
    proj_type: Side = "std"  # the side projected: std the short one, reverse_std the long one
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay of the averages of g and of g²
    eps: Positive | None = None  # null, as the authors': 1e-6, and 1e-8 with 8-bit moments
    weight_decay: NonNegative = 0.0  # decoupled, times lr
    correct_bias: bool = True  # divides by 1 - betas ** t
    nbits: Bits = 32  # bits of a moment's element
    min_8bit_size: Size = 4096  # fewer moments than these stay fp32

    def __post_init__(self) -> None:
        if self.nbits == 8:
            quantize.functional()

    def state_spec(self, shard: Shard) -> Parts:
        if not self.projects(shard):
            return self.adam.shard_state_spec(shard)
        rank, right = self.space(shard)
        total = rank * (shard.rows if right else shard.cols)
        part = lowrank.own_part(rank, right, shard, self.adam.unit(total))
        return self.adam.state_spec(part, total) | {"q": lowrank.basis_part(rank, right, shard)}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        if self.projects(shard):
            yield from self._step_projected(p, g, s, t, shard)
        else:
            u, p, shard = yield from self.adam.step(p, g, s, shard)
            yield from self.apply_(p, ops.Scaled(u, self.factor(t)), shard)

    def _step_projected(
        self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard
    ) -> Rounds:
        (rank, right), first = self.space(shard), shard.touched.start
        if (t - 1) % self.update_proj_gap == 0:
            s["q"] = yield from lowrank.basis(g, rank, right, shard)
        q, terms = s["q"], ops.terms_for(ops.operand_dtype(g))
        r = yield from lowrank.project(g, q, right, shard, terms)
        (r,) = yield (r,)

        part = lowrank.own_part(rank, right, shard, self.adam.unit(r.numel()))
        step = self.adam.advance(s, r.view(-1)[part], r.numel())
        scaled = ops.times(step, self.factor(t) * self.scale)
        u = yield from joint.evaluate(scaled, Shard.whole((part.stop - part.start,)), r)
        if right:
            own = lowrank.own_part(rank, right, shard)
            u = u[own.start - part.start : own.stop - part.start].view(-1, rank)
            yield from self.apply_(p, ops.Product(u, q, first, terms), shard)
        else:
            (u,) = yield (ops.pad(u, part, r),)
            yield from self.apply_(p, ops.Product(q, u, first, terms), shard)

    def apply_(self, p: ops.Writable, u: ops.Readable, shard: Shard) -> Rounds:
        """Steps ``p`` by an update that ``factor`` has multiplied."""
        yield from joint.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    def factor(self, t: int) -> float:
        """Returns c times 1 − lr · weight_decay, because weight decay follows the update."""
        c = self.adam.correction(t) if self.correct_bias else 1.0
        return c * (1 - self.lr * self.weight_decay)

    def projects(self, shard: Shard) -> bool:
        """Returns whether a parameter is stepped in a low-rank space."""
        return self.rank is not None and len(shard.shape) == 2 and shard.numel > 0

    def space(self, shard: Shard) -> tuple[int, bool]:
        """Returns the rank of a matrix's low-rank space, and whether its side is the right one."""
        assert self.rank is not None
        short_is_right = shard.rows >= shard.cols
        sides = {"std": short_is_right, "reverse_std": not short_is_right}
        right = sides.get(self.proj_type, self.proj_type == "right")
        return min(self.rank, shard.rows, shard.cols), right

    @functools.cached_property
    def adam(self) -> Adam:
        """Adam for a parameter or its projection."""
        eps = self.eps or (1e-8 if self.nbits == 8 else 1e-6)
        return Adam.of_bits(self.betas, eps, self.nbits, self.min_8bit_size)
