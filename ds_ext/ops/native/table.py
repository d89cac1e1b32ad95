"""The table that a native pass reads: ``Entry`` and the numbers of passes.cpp, seen from Python."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_ext.ops.native import library

# The fields of Entry in passes.cpp, in its order.
ENTRY = np.dtype(
    [(name, np.int64) for name in "start n mats rows cols first".split()]
    + [
        (name, np.uint64)
        for name in ("x w aux m v row col out out2 out3 before in in2 in3 marks measured".split())
    ]
    + [("key", np.uint32)]
    + [
        (name, np.float32)
        for name in "factor bound scale lr decay weight beta1 beta2 a b eps clip".split()
    ]
    + [("spare", np.int32)]
)
# What a number is that a pass does not set.
DEFAULTS = {"factor": 1.0, "bound": np.inf, "scale": 1.0}

FORMS = {
    name: i
    for i, name in enumerate(
        "IS_WEIGHT IS_RUN IS_QUOTIENT IS_VECTOR IS_ADAM IS_ADAM_STEP IS_RESIDUAL".split()
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
}
PASSES = {
    name: i
    for i, name in enumerate(
        "squares statistics weighed factors advance advance_square apply mark mend".split()
    )
}


def run(name: str, form: int, dtype: int, kept: int, decays: bool, entries: NDArray[Any]) -> None:
    """Makes a pass over all entries, by as many threads as torch's operations have."""
    found = library.load()
    assert found is not None
    call = (ctypes.c_int * 5)(PASSES[name], form, dtype, kept, decays)
    found.ds_ext_pass(call, entries.ctypes.data, len(entries), torch.get_num_threads(), 0)


def is_there() -> bool:
    """Returns whether native passes can be made on this machine; may build them."""
    found = library.load()
    if found is not None:
        assert found.ds_ext_entry_bytes() == ENTRY.itemsize, "passes.cpp and table.py differ"
    return found is not None
