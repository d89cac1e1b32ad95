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


def textbook(
    p: Tensor,
    steps: Sequence[Sequence[Tensor]],
    rank: int | None,
    gap: int,
    lr: float,
    scale: float = 0.25,
    weight_decay: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """The weight after ``steps`` of micro-batches' gradients. Without a rank, AdamW's."""
    beta1, beta2 = 0.9, 0.999
    p, m, v = p.double(), 0.0, 0.0
    for t, micro in enumerate(steps, 1):
        g = sum(x.double() for x in micro)
        if rank is not None:
            if (t - 1) % gap == 0:
                q, right = basis(micro[0].double(), rank)
            r = g @ q if right else q.T @ g
        else:
            r = g
        m, v = beta1 * m + (1 - beta1) * r, beta2 * v + (1 - beta2) * r**2
        n = m / (v.sqrt() + eps) * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        u = n if rank is None else scale * (n @ q.T if right else q @ n)
        p = (p - lr * u) * (1 - lr * weight_decay)
    return p
