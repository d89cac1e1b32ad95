"""Cached norms of the updated weights, for kernels."""

import math
from collections.abc import Mapping

import torch

from ds_ext.ops.executors.native.norm_cache import VERSION
from ds_ext.ops.executors.triton.folds import PartialSums
from ds_ext.ops.runs import Runs


class DeviceNormCache:
    """The sums of squares of the weights that the last step wrote, one per tile.

    They are valid while the runs have the same addresses and version counters. Writes through
    ``param.data`` do not change the counters; one weight per tile detects them. ``cached_norm``
    then reads all weights of the parameter in one program.

    Args:
        parts: one number per tile, by the name of the tiles.
        device: the device of the runs.

    Attributes:
        tiles: the name of the tiles that last wrote the runs.
    """

    def __init__(self, parts: Mapping[str, PartialSums], device: torch.device) -> None:
        self.parts, self.device = parts, device
        self.tiles = ""
        self.columns: dict[str, Runs] = {}  # a sum and a weight per tile
        self.are_valid = False
        self.are_noted = False  # whether the last pass that wrote the weights stored their sums
        self._where: bytes | None = None
        self._versions: list[int] = []

    def noted_by(self, tiles: str) -> dict[str, Runs]:
        """Returns the columns that these tiles write; allocates them if the tiles have changed."""
        self.are_noted = True
        if tiles != self.tiles:
            total, firsts = self.parts[tiles].total, self.parts[tiles].firsts
            numbers = torch.full((2, total), math.nan, dtype=torch.float32, device=self.device)
            sums, probes = numbers.unbind()
            self.tiles = tiles
            self.columns = {
                "part2": Runs((sums,), firsts=firsts),
                "probe": Runs((probes,), firsts=firsts),
            }
        return self.columns

    def check(self, runs: Runs) -> None:
        """Invalidates the cache if a run has moved or was written since ``note``."""
        versions = [*map(VERSION, runs.tensors)]
        self.are_valid = versions == self._versions and runs.pointers.tobytes() == self._where
        self.are_noted = False

    def forget(self) -> None:
        """Invalidates the cache."""
        self._where = None

    def note(self, runs: Runs) -> None:
        """Records the runs' addresses and version counters, which must include the last writes."""
        self._where = runs.pointers.tobytes() if self.are_noted else None
        self._versions = [*map(VERSION, runs.tensors)]
