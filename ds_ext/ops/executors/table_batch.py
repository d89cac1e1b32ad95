"""A batch with the tables that make passes over it: native on a CPU, of kernels on a GPU."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.batch import CPU, Batch, Geometry
from ds_ext.ops.executors.native.norm_cache import KnownSquares
from ds_ext.ops.executors.native.table import Table
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.executors.triton.known import KnownSums
from ds_ext.ops.executors.triton.passes import Table as KernelTable
from ds_ext.ops.formulas import Formula
from ds_ext.ops.shard import Shard

AnyTable: TypeAlias = Table | KernelTable
Known: TypeAlias = KnownSquares | KnownSums


class TableBatch(Batch):
    """A batch with the tables that make passes over it.

    Attributes:
        own: of the runs.
        whole: of whole parameters.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        firsts: Sequence[int] | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(shards, firsts, device)
        self.whole = new_table(self.whole_geometries, [0] * len(shards), device)
        self.own = new_table(self.geometries, self.noise_firsts, device)

    def known(self) -> Known:
        """Returns the cache of the norms of the weights, which lasts from step to step."""
        return self.own.known() if isinstance(self.own, KernelTable) else KnownSquares(len(self))

    def numbers(self, values: Tensor) -> Any:
        """Returns numbers of each parameter, [n], as rules take them: passes compute on a GPU."""
        return Formula.given(values) if isinstance(self.own, KernelTable) else values


def new_table(
    geometries: Sequence[Geometry], firsts: Sequence[int], device: torch.device
) -> AnyTable:
    """Returns a table of runs on a device, which makes passes over them."""
    if devices.take(device):
        return KernelTable(geometries, firsts, device)
    return Table(geometries, firsts)
