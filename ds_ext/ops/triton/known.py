"""What is known of weights from the step that wrote them: their sums of squares."""

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_ext.ops.triton.folds import Parts
from ds_ext.ops.triton.memory import Addresses


class KnownSums:
    """The sums of squares of weights that tiles left as they wrote them, for the next step.

    They hold for runs that lie where they did and that no operation of torch has written to since.
    What is written past torch's version counters (``param.data``) shows in a weight of each tile:
    ``recall`` then reads all weights of the parameter, by one program.

    Args:
        parts: where the tiles that write the runs leave a number each.
        device: where they lie.
    """

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self.parts, self.device = parts, device
        self.are_wanted = False  # by a rule
        self.are_valid = False
        self.are_noted = False  # by the last pass that wrote the weights
        self._where: NDArray[np.uint64] | None = None
        self._versions: list[int] = []

    @functools.cached_property
    def columns(self) -> dict[str, Addresses]:
        """Where tiles leave sums, and a weight each."""
        made = torch.full((2, self.parts.total), math.nan, dtype=torch.float32, device=self.device)
        sums, probes = made.unbind()
        return {
            "part2": Addresses(sums, self.parts.starts),
            "probe": Addresses(probes, self.parts.starts),
        }

    def check(self, runs: Any) -> None:
        """Forgets all if one of the runs was written to since ``note``."""
        versions = [x._version for x in runs.tensors]
        is_there = self._where is not None and np.array_equal(self._where, runs.pointers)
        self.are_valid = is_there and versions == self._versions
        self.are_noted = False

    def forget(self) -> None:
        """Takes the next step to know nothing."""
        self._where = None

    def note(self, runs: Any) -> None:
        """Takes the runs to be as a pass has left them, after torch was told of all writes."""
        self._where = runs.pointers if self.are_noted else None
        self._versions = [x._version for x in runs.tensors]
