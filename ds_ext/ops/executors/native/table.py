"""The table that a native pass reads: ``Entry`` and the numbers of passes.cpp, seen from Python."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops.executors.native import library

# The fields of Entry in passes.cpp, in its order.
ENTRY = np.dtype(
    [(name, np.int64) for name in "start n mats rows cols first".split()]
    + [
        (name, np.int64)
        for name in (
            "x w aux m v m_scale v_scale row col out out2 out3 before in in2 in3 marks measured "
            "known"
        ).split()
    ]
    + [("key", np.uint32)]
    + [
        (name, np.float32)
        for name in "factor bound scale lr decay weight beta1 beta2 a b eps clip share".split()
    ]
)
INSTRUCTIONS = 0  # the best that the processor has; 1: those that every one has
# What a column is that a pass over runs does not set.
DEFAULTS = {"factor": 1.0, "bound": np.inf, "scale": 1.0}
DEFAULTS |= dict.fromkeys(("out2", "in3", "measured", "known"), 0)
NUMBER = (float, int)
KNOWN = 32  # numbers of each weight by which its sum of squares is known: 1 + PROBES

FORMS = {
    name: i
    for i, name in enumerate(
        (
            "IS_WEIGHT IS_RUN IS_QUOTIENT IS_VECTOR IS_ADAM IS_ADAM_STEP IS_RESIDUAL "
            "IS_VECTOR_RESIDUAL IS_ADAM8_STEP IS_SIGN_STEP IS_SIGN8_STEP"
        ).split()
    )
}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KEPT = {
    ("PLAIN", torch.float32): 0,
    ("PLAIN", torch.bfloat16): 1,
    ("PLAIN", torch.float16): 2,
    ("STOCHASTIC", torch.bfloat16): 3,
    ("STOCHASTIC", torch.float16): 4,
    ("SPLIT", torch.bfloat16): 5,
    ("COPIED", torch.float16): 6,
    ("CORRECTED", torch.bfloat16): 7,
    ("CORRECTED", torch.float16): 8,
}
PASSES = {
    name: i
    for i, name in enumerate(
        (
            "largest squares statistics weighed factors numbers squared advance advance_square "
            "apply mark mend normalize_whole_rows normalize_rows normalize_columns"
        ).split()
    )
}


class Table:
    """A row for each parameter: its geometry, which stays, and what a pass over them needs.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the number, in its parameter, of each run's first element.
    """

    adds_two = True  # squares of weights, and of what is read with them, in one pass
    fills_whole_sums = True  # passes over whole parameters write all of their sums
    forms, passes = frozenset(FORMS), frozenset(PASSES)

    def __init__(
        self, geometries: Sequence[tuple[int, int, int, int, int]], firsts: Sequence[int]
    ) -> None:
        self.entries = np.zeros(len(geometries), dtype=ENTRY)
        self._columns = {name: self.entries[name] for name in ENTRY.names or ()}
        self._address = self.entries.ctypes.data
        columns = np.array(geometries, dtype=np.int64).T
        self.set(**dict(zip(("start", "n", "mats", "rows", "cols"), columns, strict=True)))
        self.set(first=np.array(firsts, dtype=np.int64))
        self._numbers: dict[str, float] = {}  # what columns were set to that have one number

    def scratch(self, n: int) -> Tensor:
        """Returns memory for n numbers, [n] in fp32."""
        return torch.empty(n, dtype=torch.float32, device="cpu")

    def zeros(self, n: int) -> Tensor:
        """Returns sums of nothing yet, [n] in fp32."""
        return torch.zeros(n, dtype=torch.float32, device="cpu")

    def reads(self, name: str, form: str, columns: Mapping[str, Any]) -> bool:
        """Returns whether a pass can read such a form, and such numbers."""
        return True

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
        kept: tuple[str, torch.dtype] | None = None,
        decays: bool = False,
        fresh: bool = False,
    ) -> None:
        """Makes a pass over all rows, by as many threads as torch's operations have.

        Args:
            name: of the pass.
            columns: what it needs, as ``set`` takes it, or with ``pointers`` to it, [n].
            form: what is read, one of ``FORMS``.
            dtype: of ``x``, one of ``DTYPES``.
            kept: how weights are kept, and their dtype, one of ``KEPT``.
            decays: whether ``decay`` times the weights is added to what is read.
            fresh: whether sums over rows and columns are to be written where nothing was yet.
        """
        known = self._numbers
        for key, given in {**DEFAULTS, **columns}.items():
            if isinstance(given, NUMBER):
                if known.get(key) == given:
                    continue
                known.pop(key, None)  # until the column has it: Ctrl-C may come between
                self._columns[key][:] = given
                known[key] = given
            else:
                known.pop(key, None)
                self._columns[key][:] = getattr(given, "pointers", given)
        numbers = FORMS[form], DTYPES[dtype] if dtype else 0, KEPT[kept] if kept else 0
        call = _Call(PASSES[name], *numbers, decays, fresh)
        threads = torch.get_num_threads()
        _library().passes_run(call, self._address, len(self.entries), threads, INSTRUCTIONS)


_Call = ctypes.c_int * 6


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
