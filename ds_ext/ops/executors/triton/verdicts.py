"""Verdicts on gradients, which kernels read: they do not write parameters with bad gradients."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Verdict:
    """A number per parameter of a batch, which only the device knows, and its limit.

    Attributes:
        found: has ``pointers`` to the numbers, [n] in fp32, such as sums of squares or votes.
        most: the largest number of a good gradient, [n]; the gradient is bad if it is NaN.
    """

    found: Any
    most: NDArray[np.float32]


class _Current(threading.local):
    verdict: Verdict | None = None


_current = _Current()


class using:
    """Context manager: passes skip parameters whose gradients are bad by ``verdict``.

    Tables must have as many parameters as the verdict. None: all gradients are good.
    """

    def __init__(self, verdict: Verdict | None) -> None:
        self.verdict = verdict

    def __enter__(self) -> None:
        self.before, _current.verdict = _current.verdict, self.verdict

    def __exit__(self, *_: object) -> None:
        _current.verdict = self.before


def current() -> Verdict | None:
    """Returns the verdict in use."""
    return _current.verdict
