"""Sums of squares and largest magnitudes of flat tensors, for norms and checks of gradients."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import schema
from ds_ext.ops.executors.tables import new_table, supports
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.expressions import accumulator
from ds_ext.ops.runs import Runs

# Elements that plain torch casts at a time: few bytes at the peak of a step's memory.
CHUNK = 2**16


def square_sums_of(runs: Sequence[Tensor]) -> Tensor:
    """Returns the sums of the squares of flat tensors on one device, at least one, [n]."""
    if _are_read(runs):
        return _by_table("square_sums", runs)
    return torch.stack([_square_sum(x) for x in runs])


def _square_sum(x: Tensor) -> Tensor:
    """The sum of squares of a flat tensor in plain torch; at most ``CHUNK`` elements are copied."""
    chunks = (some.to(accumulator(x.dtype)) for some in x.split(CHUNK))
    return torch.stack([torch.dot(some, some) for some in chunks]).sum()


def largest(runs: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitudes of flat tensors on one device, [n]; 0 for empty tensors.

    A magnitude is inf or NaN if an element is inf or NaN.
    """
    if _are_read(runs) and not devices.supports(runs[0].device):  # there is no kernel for it
        return _by_table("largest", runs)
    found = []
    for x in runs:
        low, high = torch.aminmax(x) if len(x) else (x.new_zeros(()), x.new_zeros(()))
        found.append(torch.maximum(high, -low).to(accumulator(x.dtype)))
    return torch.stack(found)


def _are_read(runs: Sequence[Tensor]) -> bool:
    """Whether one table can read these flat tensors."""
    layouts = {(x.dtype, x.device) for x in runs}
    if len(layouts) > 1 or not all(x.is_contiguous() for x in runs):
        return False
    ((dtype, device),) = layouts
    return dtype in schema.DTYPES and supports(device)


def _by_table(name: str, runs: Sequence[Tensor]) -> Tensor:
    """Runs a pass over flat tensors -> [n]."""
    n, device = len(runs), runs[0].device
    table = new_table([(0, len(x), 1, 1, len(x)) for x in runs], [0] * n, device)
    totals = torch.zeros(n, dtype=torch.float32, device=device)
    columns = {"x": Runs(runs), "out": Runs((totals,), firsts=np.arange(n))}
    table.run(name, columns, "IS_RUN", runs[0].dtype)
    return totals
