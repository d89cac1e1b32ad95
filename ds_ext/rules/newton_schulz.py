"""The Newton-Schulz iteration of Muon, which brings all singular values of a matrix near 1.

    X ← X / ‖X‖, then for each (a, b, c):  A = X·Xᵀ,  X ← (a·I + b·A + c·A²)·X

A is computed from X in every step, which corrects the rounding errors of the steps before. One bf16
term per operand is then enough, if X is fp32. Multiples of I are subtracted from A and from the
factor of X, and multiplied exactly, because most of what bf16 would round away is on the diagonal.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.products import add_product_, operand, symmetric_product

Coefficients: TypeAlias = Sequence[tuple[float, float, float]]  # a, b and c of each step

# Amsel et al., arXiv 2505.16932, algorithm 1: X is divided by 1.01 · ‖X‖ in the first step, and all
# polynomials but the last allow for singular values of 1.01.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
TINY = 1e-15  # least norm: its square, and products of its inverse, are finite in fp32
STEEP = 2  # steps after which most singular values are still small


def steps_of(given: str | tuple[Any, ...], count: int) -> list[tuple[float, float, float]]:
    """Returns the coefficients of ``count`` steps; the last given triple is repeated.

    Args:
        given: a triple, a list of triples, or "polar_express".
        count: the number of steps.
    """
    if given == "polar_express":
        safe = [_scaled(abc, 1.01) for abc in POLAR_EXPRESS[:-1]]
        given = (_scaled(safe[0], 1.01), *safe[1:], POLAR_EXPRESS[-1])
    triples = [tuple(abc) for abc in given] if isinstance(given[0], list | tuple) else [given]
    return [*triples, *[triples[-1]] * count][:count]


def _scaled(abc: tuple[float, float, float], by: float) -> tuple[float, float, float]:
    """The polynomial of x / by."""
    return abc[0] / by, abc[1] / by**3, abc[2] / by**5


def orthogonalized(x: Tensor, coefficients: Coefficients, eps: float, terms: int) -> Tensor:
    """Returns the last X of matrices, [n, rows, cols], with ``terms`` bf16 terms per operand."""
    is_wide = x.shape[1] < x.shape[2]
    x = x / torch.stack([one.norm() for one in x]).clamp(min=max(eps, TINY)).view(-1, 1, 1)
    for i, abc in enumerate(coefficients):
        half = operand(x, terms)
        pair = (half, half.mT) if is_wide else (half.mT, half)
        factor = _factor(symmetric_product(*pair, terms), abc, terms)
        diagonal = _diagonal(factor)
        scale = abc[0] if i < STEEP else diagonal.mean(1)
        diagonal.sub_(scale if isinstance(scale, float) else scale[:, None])
        operands = (factor, half) if is_wide else (half, factor)
        x = x.clone() if half is x else x  # the product overwrites it
        add_product_(x, *operands, terms, beta=scale)
    return x


def _factor(gram: Tensor, abc: tuple[float, float, float], terms: int) -> Tensor:
    """a·I + b·A + c·A² of matrices A, [n, side, side], from the square of A − mean·I.

    Overwrites A.
    """
    a, b, c = abc
    mean = _diagonal(gram).mean(1, keepdim=True)
    factor = gram * (b + 2 * c * mean).unsqueeze(2)
    _diagonal(factor).add_(a - c * mean.square())
    _diagonal(gram).sub_(mean)
    half = operand(gram, terms)
    return factor.add_(symmetric_product(half, half, terms), alpha=c)


def _diagonal(matrices: Tensor) -> Tensor:
    """A view of the diagonals of matrices, [n, side]."""
    return matrices.diagonal(dim1=1, dim2=2)
