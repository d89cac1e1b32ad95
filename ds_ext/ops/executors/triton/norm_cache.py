"""What is known of weights from the step that wrote them: their sums of squares."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_ext.ops.executors.triton.folds import Parts
from ds_ext.ops.executors.triton.memory import Addresses


class DeviceNormCache:
    """The sums of squares of weights that tiles left as they wrote them, for the next step.

    They hold for runs that lie where they did and that no operation of torch has written to since.
    What is written past torch's version counters (``param.data``) shows in a weight of each tile:
    ``recall`` then reads all weights of the parameter, by one program.

    Args:
        parts: where tiles that write the runs leave a number each, by the name of these tiles.
        device: where they lie.

    Attributes:
        tiles: the name of those that have written the runs last.
    """

    def __init__(self, parts: Mapping[str, Parts], device: torch.device) -> None:
        self.parts, self.device = parts, device
        self.tiles = ""
        self.columns: dict[str, Addresses] = {}  # where tiles leave sums, and a weight each
        self.are_valid = False
        self.are_noted = False  # by the last pass that wrote the weights
        self._where: NDArray[np.uint64] | None = None
        self._versions: list[int] = []

    def nbytes(self, tiles: str) -> int:
        """Returns the bytes of ``columns`` that these tiles write."""
        return 2 * 4 * self.parts[tiles].total

    def noted_by(self, tiles: str) -> dict[str, Addresses]:
        """Returns the columns that these tiles write, in memory of their own."""
        self.are_noted = True
        if tiles != self.tiles:
            total, starts = self.parts[tiles].total, self.parts[tiles].starts
            made = torch.full((2, total), math.nan, dtype=torch.float32, device=self.device)
            sums, probes = made.unbind()
            self.tiles = tiles
            self.columns = {"part2": Addresses(sums, starts), "probe": Addresses(probes, starts)}
        return self.columns

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
