"""A batch with the tables that make its passes: native code on a CPU, kernels on a GPU."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.batch import CPU, Batch, GeometryTuple
from ds_ext.ops.executors.native.native_table import NativeTable
from ds_ext.ops.executors.native.norm_cache import NormCache
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.executors.triton.device_norm_cache import DeviceNormCache
from ds_ext.ops.executors.triton.kernel_table import KernelTable as KernelTable
from ds_ext.ops.executors.triton.launch_queue import LaunchQueue
from ds_ext.ops.executors.triton.launcher import GradLimits
from ds_ext.ops.formulas import Formula
from ds_ext.ops.shard import Shard

AnyTable: TypeAlias = NativeTable | KernelTable
AnyNormCache: TypeAlias = NormCache | DeviceNormCache


class TableBatch(Batch):
    """A batch with the tables that make its passes.

    Attributes:
        own: the table of the runs.
        whole: the table of the whole parameters.
        gradients: the input whose squares the step in progress checks.
        square_parts: numbers that a pass over ``gradients`` left and that add up to the squares of
            each parameter; None before such a pass.
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
        self.gradients: Any = None
        self.square_parts: Any = None

    def attach(self, queue: LaunchQueue | None, limits: GradLimits | None = None) -> None:
        """Makes later passes over the batch a part of a bucket's step on a GPU.

        Args:
            queue: collects their launches; None: each pass is launched at once.
            limits: by which programs skip parameters with bad gradients; None: all are good.
        """
        for table in (self.own, self.whole):
            if isinstance(table, KernelTable):
                table.queue, table.limits = queue, limits

    def detach(self) -> None:
        """Ends the batch's part in a bucket's step."""
        self.attach(None)
        self.gradients = self.square_parts = None

    @property
    def limits(self) -> GradLimits | None:
        """The limits of ``attach``."""
        return self.own.limits if isinstance(self.own, KernelTable) else None

    def launch(self) -> None:
        """Launches the passes in the queue, so that torch can read their results."""
        if isinstance(self.own, KernelTable) and self.own.queue is not None:
            self.own.queue.launch()

    def new_norm_cache(self) -> AnyNormCache:
        """Returns a cache of the weights' norms, which lasts from step to step."""
        own = self.own
        return own.new_norm_cache() if isinstance(own, KernelTable) else NormCache(len(self))

    def as_scalars(self, values: Tensor) -> Any:
        """Returns one number per parameter, [n], as rules expect it: a ``Formula`` on a GPU."""
        return Formula.given(values) if isinstance(self.own, KernelTable) else values


def new_table(
    geometries: Sequence[GeometryTuple], firsts: Sequence[int], device: torch.device
) -> AnyTable:
    """Returns a table that makes passes over runs on a device."""
    if devices.supports(device):
        return KernelTable(geometries, firsts, device)
    return NativeTable(geometries, firsts)
