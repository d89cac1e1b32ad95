"""Which gradients are bad, as kernels read it: they leave the parameters of these as they are."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Verdict:
    """A number of each parameter of a batch that only the device knows, and what it may be.

    Attributes:
        found: has ``pointers`` to the numbers, [n]: fp32, such as sums of squares or votes.
        most: what a number may be at most for the gradient to be good, [n]; a NaN is not.
    """

    found: Any
    most: NDArray[np.float32]


class _Current(threading.local):
    verdict: Verdict | None = None


_current = _Current()


class using:
    """Within it, passes are made over the parameters that ``verdict`` finds to be good.

    Their tables have as many parameters as it; None: all are known to be good.
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
