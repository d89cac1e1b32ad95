"""The passes over a run that is stepped alone: a batch of one, or plain torch."""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator

import torch

from ds_ext.ops import scratch
from ds_ext.ops.batch import Batch
from ds_ext.ops.executors.native import bf16_products, library
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.table_passes import TablePasses
from ds_ext.ops.executors.tables import supports
from ds_ext.ops.executors.triton import devices
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
        return Reference(shard, scratch.product_limit(device))
    return TablePasses(Batch([shard], None if first is None else [first], device), shard)


def disable_kernels() -> None:
    """Makes the reference run passes on GPUs, in this process and in those that it starts.

    Optimizers that have stepped before must be indexed again (``index_parameters``).
    """
    _set({devices.SWITCH: "0"})


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Returns a context in which the reference runs all passes of optimizers created there."""
    before = {name: os.environ.get(name, "1") for name in (library.SWITCH, devices.SWITCH)}
    _set(dict.fromkeys(before, "0"))
    try:
        yield
    finally:
        _set(before)


def _set(switches: dict[str, str]) -> None:
    """Sets environment variables, and forgets what was chosen by their former values."""
    os.environ.update(switches)
    for chosen in (library.load, bf16_products.is_available, devices.are_available, _kept):
        chosen.cache_clear()
