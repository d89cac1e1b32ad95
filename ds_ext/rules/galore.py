"""GaLore-AdamW: Adam on gradients projected to ``rank`` dimensions. Zhao et al., arXiv 2403.03507,
algorithm 2, as in the authors' galore_torch: bias correction and eps as in its AdamW (eps is added
to the uncorrected root), weight decay after the update, moments kept when the basis is renewed, a
rank above the short side cut to it. Unlike theirs, a basis vector's sign is not left to chance.

The side is that of the whole matrix: ``std`` takes rows >= cols right, else left. What one rank of
d holds beside its run, in bytes, r the rank; 8-bit moments take 1/4 (up to 510 elements more, for
their blocks of 256 are those of the whole moment, so that any number of ranks rounds alike):
  right, R = G·V [rows, r]    basis 4·r·cols, replicated;  moments 8·r·rows / d (+ a row)
  left, R = U'·G [r, cols]    basis 4·r·rows / d (+ a row); moments 8·r·cols / d
A step takes one round (right) or two (left); renewing the basis, one more for every 2**20 elements
of the gradient, and 1 or 2. Vectors, tensors of more than two dimensions and groups with rank null
are stepped by AdamW: moments 8·numel / d, no rounds (8-bit: one if a cut goes through a block).
"""

from dataclasses import dataclass

from ds_ext import ops
from ds_ext.hyperparams import Bits, Count, Fraction, NonNegative, Positive, Side, Size
from ds_ext.ops import quantize
from ds_ext.ops.shard import Shard, outward
from ds_ext.ops.state import Part
from ds_ext.rules import lowrank


@dataclass(frozen=True)
class GaLoreAdamW:
    lr: NonNegative = 1e-3
    rank: Count | None = 128  # dimensions of the projected gradient; null: plain AdamW
    update_proj_gap: Count = 200  # steps between renewals of the basis
    scale: Positive = 0.25  # of a projected update
    proj_type: Side = "std"  # the side projected: std the short one, reverse_std the long one
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive | None = None  # null, as the authors': 1e-6, and 1e-8 with 8-bit moments
    weight_decay: NonNegative = 0.0  # decoupled, times lr
    correct_bias: bool = True
    nbits: Bits = 32  # of the moments
    min_8bit_size: Size = 4096  # fewer moments than these stay fp32

    def __post_init__(self):
        if self.nbits == 8:
            quantize.functional()

    def keeps(self, shard):
        if not self.projects(shard):
            total = shard.numel
            return self.moments(outward(shard.start, shard.stop, self.unit(total), total), total)
        rank, right = self.space(shard)
        total = rank * (shard.rows if right else shard.cols)
        part = lowrank.own_part(rank, right, shard, self.unit(total))
        return self.moments(part, total) | {"q": lowrank.basis_part(rank, right, shard)}

    def step(self, p, g, s, t, shard):
        beta1, beta2 = self.betas
        factor = (1 - beta2**t) ** 0.5 / (1 - beta1**t) if self.correct_bias else 1.0
        factor *= 1 - self.lr * self.weight_decay  # the decay is that of the updated weight
        if not self.projects(shard):
            if self.unit(shard.numel) > 1:
                before, after = yield from quantize.complete(g, shard)
                g, p = (ops.Extended(before, x, len(shard), after) for x in (g, p))
                shard = Shard.whole((len(before) + len(shard) + len(after),))
            flat = Shard.whole((len(shard),))
            u = ops.Scaled(self.adam(s, g), factor)
            ops.apply_(p, u, flat, lr=self.lr, weight_decay=self.weight_decay)
            return

        rank, right = self.space(shard)
        if (t - 1) % self.update_proj_gap == 0:
            s["q"] = yield from lowrank.basis(g, rank, right, shard)
        (r,) = yield (lowrank.project(g, s["q"], right, shard),)
        part = lowrank.own_part(rank, right, shard, self.unit(r.numel()))
        u = ops.evaluate(self.adam(s, r.view(-1)[part]), Shard.whole((part.stop - part.start,)), r)
        first = shard.touched.start
        if right:
            own = lowrank.own_part(rank, right, shard)
            u = u[own.start - part.start : own.stop - part.start]
            back = lowrank.Product(u.view(-1, rank), s["q"], first)
        else:
            (u,) = yield (ops.pad(u, part, r),)
            back = lowrank.Product(s["q"], u, first)
        u = ops.Scaled(back, factor * self.scale)
        ops.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    def projects(self, shard):
        return self.rank is not None and len(shard.shape) == 2 and shard.numel > 0

    def space(self, shard):
        """(dimensions, whether they are the right side's) of the whole matrix."""
        short_is_right = shard.rows >= shard.cols
        right = {"std": short_is_right, "reverse_std": not short_is_right}
        return min(self.rank, shard.rows, shard.cols), right.get(
            self.proj_type, self.proj_type == "right"
        )

    def unit(self, total):
        """Moments that are kept together, of ``total``: the blocks of 8-bit ones."""
        return quantize.SIZE if self.nbits == 8 and total >= self.min_8bit_size else 1

    def moments(self, part, total):
        """Moments of the elements ``part`` of ``total``."""
        kept = quantize.keeps if self.unit(total) > 1 else Part.of
        return {"m": kept(part, total), "v": kept(part, total)}

    def adam(self, s, g):
        """The update by a flat run ``g``; its blocks advance the moments and are read once."""
        m, v = s["m"], s["v"]
        if isinstance(m, dict):
            m, v = quantize.Quantized(m, signed=True), quantize.Quantized(v, signed=False)
        eps = self.eps or (1e-8 if self.nbits == 8 else 1e-6)
        return ops.AdamStep(ops.RootQuotient(m, v, eps), g, *self.betas)
