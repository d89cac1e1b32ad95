"""GaLore-AdamW over micro-batches, in fp64 on whole matrices: the textbook of projected gradients.

The basis comes from the first micro-batch of a step that renews it; R is of the sum of all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def basis(g: Tensor, rank: int) -> tuple[Tensor, bool]:
    """The leading singular vectors of the short side [side, rank], and whether it is the right one.

    Of the short side's vectors the largest component is positive.
    """
    right = g.shape[0] >= g.shape[1]
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    vectors = (vh.T if right else u)[:, :rank]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * largest.sign(), right


class Textbook:
    """The steps of one weight.

    Args:
        p: The weight before training.
        rank: Of the projection; None for AdamW.
        gap: Steps between renewals of the basis.
    """

    def __init__(
        self,
        p: Tensor,
        rank: int | None,
        gap: int,
        lr: float,
        scale: float = 0.25,
        weight_decay: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        self.p, self.rank, self.gap, self.lr = p.detach().double(), rank, gap, lr
        self.scale, self.weight_decay, self.eps = scale, weight_decay, eps
        self.t, self.m, self.v = 0, 0.0, 0.0
        self.square = 0.0  # of what the step has read of the gradient

    def step(self, micro: Sequence[Tensor]) -> None:
        """Steps by the gradients of micro-batches, which add up to the whole gradient."""
        (beta1, beta2), lr = (0.9, 0.999), self.lr
        self.t, r = self.t + 1, sum(x.double() for x in micro)
        if self.rank is not None:
            if (self.t - 1) % self.gap == 0:
                self.q, self.right = basis(micro[0].double(), self.rank)
            r = r @ self.q if self.right else self.q.T @ r
        self.square = float(r.square().sum())
        self.m, self.v = beta1 * self.m + (1 - beta1) * r, beta2 * self.v + (1 - beta2) * r**2
        u = self.m / (self.v.sqrt() + self.eps)
        u = u * (1 - beta2**self.t) ** 0.5 / (1 - beta1**self.t)
        if self.rank is not None:
            u = self.scale * (u @ self.q.T if self.right else self.q @ u)
        self.p = (self.p - lr * u) * (1 - lr * self.weight_decay)


def textbook(p: Tensor, steps: Sequence[Sequence[Tensor]], *how: int, **hypers: float) -> Tensor:
    """The weight after ``steps`` of micro-batches' gradients."""
    made = Textbook(p, *how, **hypers)
    for micro in steps:
        made.step(micro)
    return made.p
