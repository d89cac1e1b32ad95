"""Cached norms of the updated weights, for kernels."""

import math
from collections.abc import Callable

import torch

from ds_ext.ops.executors.native.native_table import NormCache
from ds_ext.ops.executors.triton.folds import PartialSums
from ds_ext.ops.runs import Runs


class DeviceNormCache(NormCache):
    """One sum and one weight per tile.

    If one of these weights has changed, ``cached_norm`` reads all weights of the parameter in one
    program.

    Args:
        partials: returns the places of one number per tile, from the name of the tiles.
        device: the device of the runs.

    Attributes:
        tiles: the name of the tiles that last wrote the runs.
    """

    def __init__(self, partials: Callable[[str], PartialSums], device: torch.device) -> None:
        super().__init__()
        self.partials, self.device = partials, device
        self.tiles = ""
        self.columns: dict[str, Runs] = {}  # a sum and a weight per tile
        self.are_noted = False  # whether the last pass that wrote the weights stored their sums

    def noted_by(self, tiles: str) -> dict[str, Runs]:
        """Returns the columns that these tiles write; allocates them if the tiles have changed."""
        self.are_noted = True
        if tiles != self.tiles:
            partials = self.partials(tiles)
            total, firsts = partials.total, partials.firsts
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
        super().check(runs)
        self.are_noted = False

    def note(self, runs: Runs) -> None:
        """Records the runs' addresses and version counters, which must include the last writes."""
        super().note(runs)
        if not self.are_noted:
            self.forget()
