"""The table that a native pass reads: rows of ``Entry``, which ``ops.schema`` describes."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops import schema
from ds_ext.ops.executors.native import library

_TYPES = {"float": np.float32, "uint32_t": np.uint32}  # of columns; all others have 8 bytes
_FIELDS = [(one.name, _TYPES.get(one.type, np.int64)) for one in schema.native_columns()]
ENTRY = np.dtype(_FIELDS, align=True)  # as C++ lays it out
INSTRUCTIONS = 0  # the best that the processor has; 1: those that every one has
# What a column is that a pass over runs does not set.
DEFAULTS = {"factor": 1.0, "bound": np.inf, "scale": 1.0}
DEFAULTS |= dict.fromkeys(("out2", "in3", "update_sums", "norm_cache"), 0)
NUMBER = (float, int)
_FORMS = {name: i for i, name in enumerate(schema.FORMS)}
_DTYPES = {dtype: i for i, dtype in enumerate(schema.DTYPES)}
_STORED = {of: i for i, of in enumerate(schema.STORED)}
_PASSES = {name: i for i, name in enumerate(schema.PASSES)}


class Table:
    """A row for each parameter: its geometry, which stays, and what a pass over them needs.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the number, in its parameter, of each run's first element.
    """

    adds_two = True  # squares of weights, and of what is read with them, in one pass
    fills_whole_sums = True  # passes over whole parameters write all of their sums
    passes = frozenset(schema.PASSES)
    takes_formulas = frozenset[str]()  # columns that may be formulas

    def __init__(
        self, geometries: Sequence[tuple[int, int, int, int, int]], firsts: Sequence[int]
    ) -> None:
        self.entries = np.zeros(len(geometries), dtype=ENTRY)
        self._columns = {name: self.entries[name] for name in ENTRY.names or ()}
        self._address = self.entries.ctypes.data
        columns = np.array(geometries, dtype=np.int64).T
        self.set(**dict(zip(("start", "n", "mats", "rows", "cols"), columns, strict=True)))
        self.set(origin=np.array(firsts, dtype=np.int64))
        self._filled: dict[str, float] = {}  # what columns were set to that have one number

    def scratch(self, n: int) -> Tensor:
        """Returns memory for n numbers, [n] in fp32."""
        return torch.empty(n, dtype=torch.float32, device="cpu")

    def zeros(self, n: int) -> Tensor:
        """Returns sums of nothing yet, [n] in fp32."""
        return torch.zeros(n, dtype=torch.float32, device="cpu")

    def set(self, **columns: Any) -> None:
        """Fills columns, each by an array or tensor [n], or by one number."""
        for name, column in columns.items():
            self._columns[name][:] = column

    def run(
        self,
        name: str,
        columns: Mapping[str, Any],
        form: str = "IS_WEIGHT",
        dtype: torch.dtype | None = None,
        storage: tuple[str, torch.dtype] | None = None,
        decays: bool = False,
        fresh: bool = False,
    ) -> None:
        """Makes a pass over all rows, by as many threads as torch's operations have.

        Args:
            name: of the pass.
            columns: what it needs, as ``set`` takes it, or with ``pointers`` to it, [n].
            form: what is read, one of ``schema.FORMS``.
            dtype: of ``x``, one of ``schema.DTYPES``.
            storage: how weights are stored, and their dtype, one of ``schema.STORED``.
            decays: whether ``decay`` times the weights is added to what is read.
            fresh: whether sums over rows and columns are to be written where nothing was yet.
        """
        filled = self._filled
        for key, given in {**DEFAULTS, **columns}.items():
            if isinstance(given, NUMBER):
                if filled.get(key) == given:
                    continue
                filled.pop(key, None)  # until the column has it: Ctrl-C may come between
                self._columns[key][:] = given
                filled[key] = given
            else:
                filled.pop(key, None)
                self._columns[key][:] = getattr(given, "pointers", given)
        read = _FORMS[form], _DTYPES[dtype] if dtype else 0, _STORED[storage] if storage else 0
        call = _Call(_PASSES[name], *read, decays, fresh)
        threads = torch.get_num_threads()
        _library().passes_run(call, self._address, len(self.entries), threads, INSTRUCTIONS)


_Call = ctypes.c_int * len(schema.CALL)


def _library() -> ctypes.CDLL:
    found = library.load()
    assert found is not None, "there are no native passes"
    return found


def is_there() -> bool:
    """Returns whether native passes can be made on this machine; may build them."""
    found = library.load()
    if found is not None:
        assert found.passes_entry_bytes() == ENTRY.itemsize, "passes.cpp and table.py differ"
    return found is not None
