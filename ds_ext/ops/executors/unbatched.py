"""Passes outside of batches: tables or plain torch run them, by the device and the dtype.

A run that is stepped alone is a batch of one. Flat tensors are measured for norms and checks.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_ext.ops import block_sizes, schema
from ds_ext.ops.batch import Batch
from ds_ext.ops.executors.native import library
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.table_passes import TablePasses
from ds_ext.ops.executors.tables import AnyTable, each_of, new_table, supports
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.expressions import Gradient, accumulator
from ds_ext.ops.runs import Call, Columns, Runs
from ds_ext.ops.shard import Shard

# Elements that plain torch casts at a time: few bytes at the peak of a step's memory.
CHUNK = 2**16


def passes_of_run(shard: Shard, like: Gradient | None, first: int | None) -> Reference:
    """Returns the passes over a run: see ``functions.PassesOfRun``."""
    if like is None:
        return Reference(shard)
    return _kept(shard.turnless, like.device, like.dtype, first, threading.get_ident())


@functools.lru_cache(4096)
def _kept(
    shard: Shard, device: torch.device, dtype: torch.dtype, first: int | None, thread: int
) -> Reference:
    """The passes over a run. A pass fills its table's columns, so each thread has its own."""
    has_one_box = shard.split is None or len(list(shard.pieces())) < 2
    if dtype == torch.float64 or not shard.numel or not has_one_box or not supports(device):
        return Reference(shard, block_sizes.product_limit(device))
    return TablePasses(Batch([shard], None if first is None else [first], device), shard)


def disable_tables(device: torch.device) -> None:
    """Makes the reference run passes on a device, in this process and in those that it starts.

    Optimizers that have stepped before must be indexed again (``index_parameters``).
    """
    _set({devices.SWITCH if device.type in devices.DEVICES else library.SWITCH: "0"})


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
    for chosen in (library.load, devices.are_available):
        chosen.cache_clear()
    forget_tables()


def forget_tables() -> None:
    """Forgets the tables of runs, whose kind follows from what is available."""
    _kept.cache_clear()
    _of_flats.cache_clear()


def square_sums_of(runs: Sequence[Tensor]) -> Tensor:
    """Returns the sums of the squares of flat tensors on one device, at least one, [n]."""
    layout = Runs(runs).layout
    if layout is None or layout.dtype not in schema.DTYPES or not supports(layout.device):
        return torch.stack([_square_sum(x) for x in runs])
    table = _of_flats(layout.sizes, layout.device, threading.get_ident())
    totals = torch.zeros(len(runs), dtype=torch.float32, device=layout.device)
    columns: Columns = {"x": Runs(runs), "out": each_of(totals)}
    table.run(Call("square_sums", columns, "IS_RUN", layout.dtype))
    return totals


@functools.lru_cache(256)
def _of_flats(sizes: tuple[int, ...], device: torch.device, thread: int) -> AnyTable:
    """The table of flat tensors, which is the same for a bucket in each step."""
    return new_table([(0, n, 1, 1, n) for n in sizes], [0] * len(sizes), device)


def _square_sum(x: Tensor) -> Tensor:
    """The sum of squares of a flat tensor in plain torch; at most ``CHUNK`` elements are copied."""
    chunks = (some.to(accumulator(x.dtype)) for some in x.split(CHUNK))
    return torch.stack([torch.dot(some, some) for some in chunks]).sum()


def largest(runs: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitudes of flat tensors on one device, [n]; 0 for empty tensors.

    A magnitude is inf or NaN if an element is inf or NaN.
    """
    found = []
    for x in runs:
        low, high = torch.aminmax(x) if len(x) else (x.new_zeros(()), x.new_zeros(()))
        found.append(torch.maximum(high, -low).to(accumulator(x.dtype)))
    return torch.stack(found)
