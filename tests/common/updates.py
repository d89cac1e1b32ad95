"""Weights after training, compared with a reference relative to the size of its update."""

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def error(after: Weights, expected: Weights, before: Weights) -> float:
    """‖after − expected‖ / ‖expected − before‖ over all weights of ``expected``."""
    pairs = [(after[n], p.detach(), before[n]) for n, p in expected.items()]
    off = sum((a - p).double().square().sum() for a, p, _ in pairs)
    update = sum((p - b).double().square().sum() for _, p, b in pairs)
    return float((off / update).sqrt())


def check_each(
    after: Weights, expected: Weights, before: Weights, steps: int = 0, close: float = 1e-5
) -> None:
    """Asserts that the error of each weight is at most ``close`` times its update.

    ``steps`` allows the rounding of the weight to fp32 at each of so many steps.
    """
    for n, p in expected.items():
        p = p.detach()
        off, update = (after[n] - p).norm(), (p - before[n]).norm()
        assert off <= max(close * update, steps * 2**-24 * p.norm()), (n, off, update)


def check(
    after: Weights, expected: Weights, before: Weights, steps: int, close: float = 1e-5
) -> None:
    """Asserts that the errors of all weights, each and together, are at most ``close``.

    A rule that rounds its state to 8 bits has a larger ``close``. A code that jumps is an outlier
    there, and an error of the sharding is in every weight, so the median of the errors counts.
    """
    if close > 1e-3:
        moved = [n for n, p in expected.items() if not torch.equal(p.detach(), before[n])]
        assert statistics.median(error(after, {n: expected[n]}, before) for n in moved) <= close
    else:
        check_each(after, expected, before, steps, close)
        assert error(after, expected, before) <= close
