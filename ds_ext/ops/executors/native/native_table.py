"""The table of a native pass: one row of ``Entry`` per parameter; cached norms of weights."""

import ctypes
import operator
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops import schema
from ds_ext.ops.executors.native import library
from ds_ext.ops.runs import Call, Pointers, Runs

_TYPES = {"float": np.float32, "uint32_t": np.uint32}  # of columns; all others have 8 bytes
_FIELDS = [(one.name, _TYPES.get(one.type, np.int64)) for one in schema.native_columns()]
ENTRY = np.dtype(_FIELDS, align=True)  # the layout of C++
INSTRUCTIONS = 0  # 0: the processor's best instruction set; 1: the baseline
# Values of columns that a pass does not set.
DEFAULTS = {"factor": 1.0, "bound": np.inf, "scale": 1.0}
DEFAULTS |= dict.fromkeys(("out2", "out3", "in3", "norm_cache"), 0)
GEOMETRY = ("start", "n", "mats", "rows", "cols", "origin")
_FORMS = {name: i for i, name in enumerate(schema.FORMS)}
_DTYPES = {dtype: i for i, dtype in enumerate(schema.DTYPES)}
_STORED = {of: i for i, of in enumerate(schema.STORED)}
_PASSES = {name: i for i, name in enumerate(schema.PASSES)}


class NativeTable:
    """One row per parameter: its geometry, which is fixed, and the arguments of the next pass.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the index of each run's first element in its parameter.
    """

    def __init__(
        self, geometries: Sequence[tuple[int, int, int, int, int]], firsts: Sequence[int]
    ) -> None:
        self.entries = np.zeros(len(geometries), dtype=ENTRY)
        self._columns = {name: self.entries[name] for name in ENTRY.names or ()}
        self._address = self.entries.ctypes.data
        columns = (*np.array(geometries, dtype=np.int64).T, firsts)
        for name, column in zip(GEOMETRY, columns, strict=True):
            self.entries[name] = column
        self._sizes = {name: self.entries[name].copy() for name in ("n", "mats")}

    def skip(self, rows: NDArray[np.bool_]) -> None:
        """Lets passes skip ``rows``, [n], and no others."""
        for name, sizes in self._sizes.items():
            self.entries[name] = np.where(rows, 0, sizes)

    def scratch(self, n: int) -> Tensor:
        """Returns uninitialized memory, [n] in fp32."""
        return torch.empty(n, dtype=torch.float32, device="cpu")

    def zeros(self, *sizes: int) -> Sequence[Tensor]:
        """Returns zeros to add sums to, [n] in fp32 for each size."""
        return torch.zeros(sum(sizes), dtype=torch.float32, device="cpu").split_with_sizes(sizes)

    def run(self, call: Call) -> None:
        """Makes a pass over all rows, with as many threads as torch's operations use.

        Args:
            call: the pass. A column is a number, an array or tensor [n], or has ``pointers``.
        """
        name, columns, form, dtype, storage, decays = call
        for key, given in {**DEFAULTS, **columns}.items():
            self._columns[key][:] = getattr(given, "pointers", given)
        read = _FORMS[form], _DTYPES[dtype] if dtype else 0, _STORED[storage] if storage else 0
        shared = _Shared(_PASSES[name], *read, decays)
        threads = torch.get_num_threads()
        found = library.load()
        assert found is not None, "there are no native passes"
        found.passes_run(shared, self._address, len(self.entries), threads, INSTRUCTIONS)


_Shared = ctypes.c_int * len(schema.CALL)


def is_available() -> bool:
    """Returns whether this machine has native passes; may build them."""
    found = library.load()
    if found is not None:
        assert found.passes_entry_bytes() == ENTRY.itemsize, "C++ has other columns"
    return found is not None


VERSION = operator.attrgetter("_version")


class NormCache:
    """The sums of squares of the weights that the last step wrote.

    They are valid while the runs have the same addresses and version counters. Writes through
    ``param.data`` do not change the counters; sampled weights detect them.

    Attributes:
        are_valid: whether the runs are as they were noted.
    """

    are_valid = False
    _noted: tuple[bytes, list[int]] | None = None

    def check(self, runs: Runs) -> None:
        """Invalidates the cache if a run has moved or was written since ``note``."""
        self.are_valid = self._noted == (runs.pointers.tobytes(), [*map(VERSION, runs.tensors)])
        if not self.are_valid:
            self.forget()

    def forget(self) -> None:
        """Invalidates the cache."""
        self._noted = None

    def note(self, runs: Runs) -> None:
        """Records the runs' addresses and version counters, which must include the last writes."""
        self._noted = runs.pointers.tobytes(), [*map(VERSION, runs.tensors)]


class NativeNormCache(NormCache):
    """One sum for each of ``n`` parameters, and ``schema.PROBES`` of its weights."""

    def __init__(self, n: int) -> None:
        self._values = np.full((n, 1 + schema.PROBES), -1, dtype=np.float32)
        self.pointers: Pointers = self._values.ctypes.data + self._values.strides[0] * np.arange(n)

    def forget(self) -> None:
        """Invalidates the cache."""
        super().forget()
        self._values[:, 0] = -1
