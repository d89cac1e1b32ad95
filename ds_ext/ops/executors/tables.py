"""The tables that run the passes over a batch: native code on a CPU, kernels on a GPU.

Tables read and write by address. ``inputs`` and ``checked`` make sure of the dtype, the device and
the size of what they read and write.
"""

from collections.abc import Container, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops import schema
from ds_ext.ops.batch import CPU, Batch, GeometryTuple
from ds_ext.ops.executors.native import native_table
from ds_ext.ops.executors.native.native_table import NativeNormCache, NativeTable, NormCache
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.executors.triton.kernel_table import DeviceNormCache, KernelTable
from ds_ext.ops.executors.triton.launch_memory import DeviceArrays
from ds_ext.ops.expressions import Scaled, Source, WeightStorage
from ds_ext.ops.runs import Columns, Pointers, Runs

AnyTable: TypeAlias = NativeTable | KernelTable

# The dtypes of columns, of columns of 8-bit moments, and of residuals by the storage of weights.
FP32 = frozenset({torch.float32})
DTYPES: dict[str, Container[torch.dtype]] = {"x": schema.DTYPES}
CODES = {"m": {torch.int8}, "v": {torch.uint8}, "m_scale": {torch.int16}, "v_scale": {torch.int16}}
RESIDUALS = {"SPLIT": {torch.int16}, "CORRECTED": {torch.int8}, "COPIED": FP32}


class Unsupported(Exception):
    """No table can read an expression; nothing has been read or written yet."""


class BatchTables:
    """The tables of a batch, and its part in the step of a bucket.

    Attributes:
        arrays: the batch's part of a bucket's step on a GPU.
        is_limited: whether passes of native code skip parameters.
        own: the table of the runs.
        whole: the table of the whole parameters.
        gradients: the input whose squares the step in progress checks.
        square_parts: sums of squares over rows that a pass over ``gradients`` has made; None before
            such a pass.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.arrays = DeviceArrays()
        self.is_limited = False
        no_firsts = [0] * len(batch)
        self.whole = new_table(batch.whole_geometries, no_firsts, batch.device, self.arrays)
        self.own = new_table(batch.geometries, batch.noise_firsts, batch.device, self.arrays)
        self.gradients: object = None
        self.square_parts: Runs | None = None

    def begin(self, p: WeightStorage, gradients: object) -> None:
        """Copies the addresses that a step's launches need to the device, if they run there.

        Weights and states mostly lie where they lay in the step before.
        """
        self.arrays.limits = {}  # a step that failed has left its limits
        if self.is_limited:
            self._skip(np.zeros(len(self.batch), dtype=np.bool_))
        if self.arrays.memory is None:
            return
        run = gradients.x if isinstance(gradients, Scaled) else gradients
        known = [run.pointers] if isinstance(run, Runs) else []
        if isinstance(p.key, np.ndarray):
            known.append(p.key)
        self.arrays.begin(x.tobytes() for x in known)

    def skip_bad(self, found: Tensor, most: NDArray[np.float32]) -> None:
        """Lets further passes of the step skip parameters whose number exceeds its limit.

        Args:
            found: the numbers, [n], such as sums of squares of gradients.
            most: the largest numbers of good gradients, [n]; NaN is bad.
        """
        if isinstance(self.own, KernelTable):
            self.arrays.limits = {"found": each_of(found), "most": most}
            return
        is_good = found.numpy() <= most
        if not is_good.all():
            self._skip(~is_good)

    def _skip(self, rows: NDArray[np.bool_]) -> None:
        """Lets passes of native code skip some parameters."""
        self.is_limited = bool(rows.any())
        for table in (self.own, self.whole):
            assert isinstance(table, NativeTable)
            table.skip(rows)

    def detach(self) -> None:
        """Ends the batch's part in a bucket's step."""
        if self.arrays.memory is not None:
            self.arrays.end()
        self.gradients = self.square_parts = None

    def added_up(self) -> Tensor | None:
        """Sums of squares of gradients, [n], from row sums of an earlier pass; None without."""
        left = self.square_parts
        if left is None:
            return None
        if isinstance(self.whole, KernelTable):
            return self.whole.added_up(left)
        sums = np.add.reduceat(left.values.numpy(), left.offsets // 4, dtype=np.float64)
        return torch.from_numpy(sums).float()

    def keep_square_parts(self, x: object, rows: Runs) -> None:
        """If ``x`` is the gradients of the batch, keeps the row sums of their squares."""
        if x is self.gradients:
            self.square_parts = rows

    def new_norm_cache(self) -> NormCache:
        """Returns a cache of the weights' norms, which lasts from step to step."""
        if isinstance(self.own, KernelTable):
            return DeviceNormCache(self.own)
        return NativeNormCache(len(self.batch))


def new_table(
    geometries: Sequence[GeometryTuple],
    firsts: Sequence[int],
    device: torch.device,
    arrays: DeviceArrays | None = None,
) -> AnyTable:
    """Returns a table that makes passes over runs on a device."""
    if devices.supports(device):
        return KernelTable(geometries, firsts, device, arrays)
    return NativeTable(geometries, firsts)


def supports(device: torch.device) -> bool:
    """Whether tables make passes on a device: native ones on a CPU, kernels on a GPU."""
    return devices.supports(device) or device == CPU and native_table.is_available()


def inputs(batch: Batch, source: Source, written: WeightStorage | None = None) -> Columns:
    """The tensors of an input, and of the weights that a pass writes, by column.

    Raises Unsupported if a table cannot read and write them.
    """
    found, is_8bit = {}, "m_scale" in source.tensors
    for column, x in source.tensors.items():
        dtypes = CODES[column] if is_8bit and column in CODES else DTYPES.get(column, FP32)
        sizes = batch.run_sizes
        if column in ("row", "col"):
            sizes = batch.row_sizes if column == "row" else batch.col_sizes
        elif column.endswith("_scale"):
            sizes = batch.group_sizes
        found[column] = checked(x, batch, sizes, dtypes)
    if "row" in found:
        found["row"] = found["row"].shifted(batch.row_offsets)
        found["col"] = found["col"].shifted(batch.col_offsets)
    weights = written or source.storage
    return found if weights is None else found | weight_columns(batch, weights)


def weight_columns(batch: Batch, weights: WeightStorage) -> Columns:
    """The columns of weights; raises Unsupported if a table cannot read and write them."""
    found: Columns = {
        "w": checked(weights.run, batch, batch.run_sizes, schema.STORAGE[weights.format])
    }
    if weights.aux is not None:
        found["aux"] = checked(weights.aux, batch, batch.run_sizes, RESIDUALS[weights.format])
    if weights.format == "STOCHASTIC":
        found["key"] = weights.key
    return found


def checked(
    x: object, batch: Batch, sizes: tuple[int, ...], dtypes: Container[torch.dtype] = FP32
) -> Runs:
    """The runs of a column, which tables read and write by address without further checks.

    Raises Unsupported unless they are contiguous, on the batch's device, and of these sizes and
    dtypes. What passes have made, or have checked before, is not checked.
    """
    runs = Runs([x]) if isinstance(x, Tensor) else x
    if not isinstance(runs, Runs):
        raise Unsupported
    if runs.is_checked:
        return runs
    layout = runs.layout
    if layout is None or layout.dtype not in dtypes or layout.sizes != sizes:
        raise Unsupported
    if layout.device != batch.device:
        raise Unsupported
    return runs


def totals_of(sums: Tensor, firsts: Pointers, n: int) -> Runs:
    """Sums over all ranks, [n]; raises Unsupported if a table cannot read them."""
    if sums.dtype != torch.float32 or sums.numel() != n:
        raise Unsupported
    return Runs((sums.contiguous(),), firsts=firsts)


def each_of(total: Tensor) -> Runs:
    """A vector with one number per parameter as a ``Runs``."""
    return Runs((total,), firsts=np.arange(total.numel()))
