"""GaLore-AdamW in fp64 on whole matrices, over steps of one or more micro-batches: its textbook.

The formulas are galore_torch's, with the signs of the basis fixed. The basis comes from the first
micro-batch of a step that renews it; R is of the sum of all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def side_of(shape: Sequence[int], proj_type: str = "std") -> str:
    """The side that is projected, as galore_torch's GaLoreProjector chooses it."""
    is_tall = shape[0] >= shape[1]
    return {
        "std": "right" if is_tall else "left",
        "reverse_std": "left" if is_tall else "right",
    }.get(proj_type, proj_type)


def basis(g: Tensor, rank: int, proj_type: str = "std") -> tuple[Tensor, bool]:
    """The leading singular vectors of a side [side, rank], and whether it is the right one.

    Of the short side's vectors the largest component is positive.
    """
    rows, cols = g.shape
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    right = side_of(g.shape, proj_type) == "right"
    short = vh.T if rows > cols or (rows == cols and right) else u
    signs = short.gather(0, short.abs().argmax(0, keepdim=True)).sign()
    return ((vh.T if right else u) * signs)[:, :rank], right


class Textbook:
    """The steps of one weight.

    Args:
        p: The weight before training.
        rank: Of the projection; None for AdamW, which also steps what is no matrix.
        gap: Steps between renewals of the basis.
        quantized: Rounds the moments (m, v) after a step.
    """

    def __init__(
        self, p: Tensor, rank: int | None, gap: int, lr: float = 1e-3, scale: float = 0.25,
        weight_decay: float = 0.0, eps: float = 1e-6, betas: tuple[float, float] = (0.9, 0.999),
        proj_type: str = "std", correct_bias: bool = True,
        quantized: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    ) -> None:  # fmt: skip
        self.p, self.rank, self.gap, self.lr = p.detach().double(), rank, gap, lr
        self.scale, self.weight_decay, self.eps, self.betas = scale, weight_decay, eps, betas
        self.proj_type, self.correct_bias, self.quantized = proj_type, correct_bias, quantized
        self.is_projected = rank is not None and p.dim() == 2
        self.t, self.m, self.v = 0, 0.0, 0.0
        self.square = 0.0  # of what the step has read of the gradient

    def step(self, micro: Sequence[Tensor]) -> None:
        """Steps by the gradients of micro-batches, which add up to the whole gradient."""
        (beta1, beta2), lr = self.betas, self.lr
        self.t, r = self.t + 1, sum(x.double() for x in micro)
        if self.is_projected:
            if (self.t - 1) % self.gap == 0:
                self.q, self.right = basis(micro[0].double(), self.rank, self.proj_type)
            r = r @ self.q if self.right else self.q.T @ r
        self.square = float(r.square().sum())
        self.m, self.v = beta1 * self.m + (1 - beta1) * r, beta2 * self.v + (1 - beta2) * r**2
        u = self.m / (self.v.sqrt() + self.eps)
        if self.correct_bias:
            u = u * (1 - beta2**self.t) ** 0.5 / (1 - beta1**self.t)
        if self.is_projected:
            u = self.scale * (u @ self.q.T if self.right else self.q @ u)
        self.p = (self.p - lr * u) * (1 - lr * self.weight_decay)
        if self.quantized is not None:
            self.m, self.v = self.quantized(self.m, self.v)


def textbook(p: Tensor, steps: Sequence[Sequence[Tensor]], *how: Any, **hypers: Any) -> Tensor:
    """The weight after ``steps`` of micro-batches' gradients."""
    made = Textbook(p, *how, **hypers)
    for micro in steps:
        made.step(micro)
    return made.p
