"""Finds gradients that are not finite, and leaves their parameters unchanged.

A gradient is bad if an element is not finite, or so large that sums of squares may overflow. Each
gradient is checked in one of two ways, and all ranks see the same result:

- In a batch, by the first round of its rule. Ranks add their sums of squares to the message of that
  round. The passes after it skip the parameters of bad gradients. Kernels read the sums on the
  device, so the host does not wait. ``GradFlags`` tells the host once, at the end of the step.
- By votes, which ranks exchange together with the gradients: parameters that are stepped alone,
  stacks of experts, and rules that write before their first round.

The sums cost no read of the gradient if the rule adds up squares anyway; votes cost one.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import ops

# A rank votes 1 for a good gradient, BAD_VOTE for a bad one. The sum over ranks of a good gradient
# is at most MAX_GOOD_VOTES.
BAD_VOTE, MAX_GOOD_VOTES = 2.0**20, 2.0**19


def upper_bound(numel: Any, dtype: torch.dtype) -> Any:
    """Returns the largest allowed sum of squares of a gradient of ``numel`` elements."""
    return torch.finfo(ops.accumulator(dtype)).max / numel


class GradFlags:
    """The values by which passes check the gradients of a step, on the device.

    The host reads them once, when the step ends.
    """

    def __init__(self) -> None:
        self.checked: list[tuple[Tensor, float, bool]] = []  # parameter, bound, is_square
        self._values: list[Tensor] = []

    def add(
        self, params: Sequence[Tensor], values: Tensor, bounds: NDArray[np.float32], is_square: bool
    ) -> None:
        """Adds the values of a batch.

        Args:
            params: of the gradients; the experts of a stack have one parameter.
            values: the values, [n]; nothing else may write to this memory.
            bounds: the largest allowed values, [n].
            is_square: whether the values are sums of squares, which add up to the norm.
        """
        self._values.append(values)
        self.checked += zip(params, bounds.tolist(), itertools.repeat(is_square), strict=False)

    def read(self, *extra: Tensor) -> tuple[list[Tensor], float, list[float]]:
        """Synchronizes with the device; returns what passes have found, and the extra scalars.

        That is the parameters that were not stepped, and the sum of squares of the gradients that
        sums of squares have checked, infinite if one is bad. Both are equal on all ranks.
        """
        first = extra[0].device if extra else self._values[0].device
        checked = torch.cat([x.to(first) for x in self._values]).double()
        more = [x.to(first, torch.float64).view(1) for x in extra]
        read = torch.cat([checked, *more]).tolist()
        square, bad, n = 0.0, dict[Tensor, None](), len(self.checked)
        for (param, bound, is_square), value in zip(self.checked, read[:n], strict=True):
            is_good = value <= bound
            if not is_good:
                bad[param] = None
            if is_square:
                square += value if is_good else math.inf
        return [*bad], square, read[n:]


@dataclass(frozen=True)
class GradCheck:
    """How to check the gradients of a bucket.

    Attributes:
        params: parameters whose gradients the first round checks by sums of squares; the same on
            all ranks. Their rules yield sums before they write.
        votes: the votes on gradients that passes check by votes, [] each on the device.
        flags: records the values that passes check.
    """

    params: Set[Tensor] = frozenset()
    votes: Mapping[Tensor, Tensor] = field(default_factory=dict)
    flags: GradFlags = field(default_factory=GradFlags)

    def ways(self, params: Iterable[Tensor]) -> tuple[bool, bool]:
        """Returns whether the gradients of a batch are checked by sums, and by votes."""
        found = {(p in self.params, p in self.votes) for p in params}
        assert len(found) == 1, "the gradients of a batch are all checked in the same way"
        return found.pop()
