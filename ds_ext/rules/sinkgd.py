"""SinkGD: gradient descent with rows and columns of the gradient normalized. No state.

Scetbon et al., arXiv 2502.06742, algorithms 3 and 4:

    x = g; ``iterations`` times:
        x ← each row of x, scaled to the norm √cols
        x ← each column of x, scaled to the norm √rows
    p ← p (1 − a · weight_decay) − a · x,  a = lr · alpha

Two options have the meaning that axolotl's SinkGD gives them:

    base_width:  a = lr · alpha · (base_width / columns) ^ width_exponent
    spectral:    x ← x · target / σ, with target 1 ("unit") or √(rows / columns) ("muon")

σ estimates the largest singular value of x, by ``spectral_iterations`` steps of a power iteration
that begins with the last step's vector u: v = x·u, z = xᵀ·v, σ = ‖z‖ / ‖v‖, u ← z / ‖z‖. Unlike
axolotl, a gradient of zeros leaves u as it is, and u begins with the same numbers on all devices.

Norms below ``eps`` count as ``eps``. In every iteration x is g times a row factor and a column
factor. A step keeps only these factors, 4·(R + C) bytes, and reads g again.

If runs hold whole rows (``Shard.holds_rows``), an iteration takes one read of g and one round with
a number per column. Otherwise it takes two of both, because column sums need the rows' factors. A
power iteration takes two reads and one round, otherwise two rounds. Zeros stay zeros; rows with a
norm below 1e-17 stay small.

The rule is for the matrices of linear layers. FlashAdamW steps embeddings, the output head and
vectors, which the paper steps with Adam. If a script's own param group contains other shapes, a
tensor with more than two dimensions is a stack of matrices, and a parameter with fewer is one row,
so that only signs remain.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.hyperparams import Count, NonNegative, Positive, Size, Spectrum
from ds_ext.ops.normal import normals
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts
from ds_ext.rules.base import Rounds, State, Sums, register


@register(
    paper="2502.06742",
    state="0; 4·C with spectral",
    rounds="5, or 10; one more, or two, with spectral",
    is_batched=lambda rule, shard: rule.spectral == "none",
    sums_first=True,
    others={"type": "FlashAdamW"},
    any_shape=True,
    has_sections=True,
)
@dataclass(frozen=True)
class SinkGD:
    """Gradient descent with normalized rows and columns, without state (arXiv 2502.06742)."""

    lr: NonNegative = 1e-3  # learning rate, times alpha
    iterations: Count = 5  # of normalizing rows, then columns
    alpha: NonNegative = 0.05  # times lr: x has an RMS of 1, larger than Adam's update
    eps: Positive = 1e-8  # least norm of a row or column
    weight_decay: NonNegative = 0.0  # decoupled, times lr · alpha
    base_width: Size = 0  # columns of the matrices that lr was tuned for; 0: any
    width_exponent: NonNegative = 1.0  # lr is multiplied by (base_width / columns) to this power
    # largest singular value of an update before lr: any, 1, or sqrt(rows / columns)
    spectral: Spectrum = "none"
    spectral_iterations: Count = 1  # power iterations per step to estimate it

    def __post_init__(self) -> None:
        if self.base_width and self.spectral == "muon":
            raise ValueError(
                f'base_width={self.base_width} and spectral="muon" both correct for the width: '
                'set base_width to 0, or spectral to "unit".'
            )

    def state_spec(self, shard: Shard) -> Parts:
        return {"u": Part.whole(shard.mats, shard.cols)} if self.spectral != "none" else {}

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        x = ops.unit_quotient(g, shard, g)
        for _ in range(self.iterations):
            if shard.holds_rows:
                x, sums = ops.normalize_whole_rows(x, self.eps, shard, g)
            else:
                (sums,) = yield ops.row_col_square_sums(x, shard, g)[:1]
                x = ops.normalize_rows(x, sums, self.eps, shard)
                sums = ops.row_col_square_sums(x, shard, g)[1]
            (sums,) = yield (sums,)
            x = ops.normalize_columns(x, sums, self.eps, shard)
        if self.spectral != "none":
            x = yield from self.to_target(x, s["u"], t, shard)
        lr = self.lr * self.alpha
        if self.base_width:
            lr = lr * shard.width_ratio(self.base_width) ** self.width_exponent
        ops.apply_(p, x, shard, lr=lr, weight_decay=self.weight_decay)

    def to_target(
        self, x: ops.Quotient, u: Tensor, t: int, shard: Shard
    ) -> Generator[Sums, Sums, ops.Quotient]:
        """Returns x with each matrix's estimate of its norm at the target; advances u."""
        if t == 1:
            begin = normals(u.new_zeros((), dtype=torch.int64), 0, 0, slice(0, u.numel()))
            u.copy_(begin.view_as(u))
        for _ in range(self.spectral_iterations):
            v, z = u.new_zeros(shard.mats, shard.rows, 1), u.new_zeros(shard.mats, 1, shard.cols)
            for b in ops.blocks(shard, u):
                v[b.mats, b.rows] += ops.read(x, b) @ u[b.mats, b.cols].unsqueeze(2)
            if not shard.holds_rows:
                (v,) = yield (v,)
            for b in ops.blocks(shard, u):
                z[b.mats, :, b.cols] += v[b.mats, b.rows].mT @ ops.read(x, b)
            z, length = yield z, v.square().sum(1, keepdim=True)
            # Otherwise, each rank has the whole v.
            length = length if shard.holds_rows else v.square().sum(1, keepdim=True)
            norm = z.norm(dim=2, keepdim=True)
            u.copy_(torch.where(norm > 0, z / norm, u.unsqueeze(1)).squeeze(1))
        target = (shard.rows / shard.cols) ** 0.5 if self.spectral == "muon" else 1.0
        scale = torch.where(norm > 0, target * length.sqrt() / norm, 0.0)
        return replace(x, col=x.col * scale)
