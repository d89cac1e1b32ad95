"""The passes over a run that is stepped alone: a batch of one, or plain torch."""

import functools
import threading

import torch

from ds_ext.ops.batch import Batch
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.table_passes import TablePasses
from ds_ext.ops.executors.tables import supports
from ds_ext.ops.expressions import Gradient
from ds_ext.ops.shard import Shard


def passes_of_run(shard: Shard, like: Gradient | None, first: int | None = None) -> Reference:
    """Returns the passes over a run: see ``functions.PassesOfRun``."""
    if like is None:
        return Reference(shard)
    return _kept(shard, like.device, like.dtype, first, threading.get_ident())


@functools.lru_cache(4096)
def _kept(
    shard: Shard, device: torch.device, dtype: torch.dtype, first: int | None, thread: int
) -> Reference:
    """The passes over a run. A pass fills its table's columns, so each thread has its own."""
    has_one_box = shard.split is None or len(list(shard.pieces())) < 2
    if dtype == torch.float64 or not shard.numel or not has_one_box or not supports(device):
        return Reference(shard)
    return TablePasses(Batch([shard], None if first is None else [first], device), shard)
