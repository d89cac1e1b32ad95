"""Runs to step: this rank's run of a weight, and its gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ext.ops.executors.unbatched import square_sums_of
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import NestedState


class RunUpdate(NamedTuple):
    """One rank's part in the step of one parameter."""

    param: Tensor  # the key of its state and group
    p: Tensor  # this rank's run of the weight, [len(shard)], updated in place
    g: Any  # the same run of the gradient, or ProjectedGrads
    shard: Shard  # which elements of the whole parameter the run is
    num_replicas: int = 1  # ranks with equal runs, whose sums ``Layout.total`` adds


@dataclass
class ProjectedGrads:
    """The sums of a parameter's gradients, as its rule has projected them.

    One for each matrix: a parameter has one, a stack has one for each expert.
    """

    numel_of_run: int
    state: NestedState  # of the parameter, with its projection
    param_dtype: torch.dtype
    parts: dict[int, Any] = field(default_factory=dict)  # by expert; ``values`` is a tensor [n]

    @property
    def values(self) -> list[Tensor]:
        """The kept numbers, [n] of each part."""
        return [part.values for part in self.parts.values()]

    @property
    def device(self) -> torch.device:
        """The device of the gradient."""
        return self.values[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradient."""
        return self.values[0].dtype

    def numel(self) -> int:
        """Returns the number of elements in the run of the gradient."""
        return self.numel_of_run

    def square(self) -> Tensor:
        """Returns the sum of squares of this rank's part, []."""
        return square_sums_of(self.values).sum()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces the kept numbers by ``move`` of them."""
        for part in self.parts.values():
            part.values = move(part.values)

    def scaled_(self, factor: float) -> "ProjectedGrads":
        """Multiplies the kept numbers by a factor in place."""
        if factor != 1:
            for values in self.values:
                values.mul_(factor)
        return self
