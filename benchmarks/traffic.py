"""Counts the bytes of memory that a step reads and writes per parameter.

A native pass's name, form and dtypes determine what it reads and writes. Only tensors as large as
parameters are counted; row and column sums are small in comparison. A sum of squares of weights
counts only if the previous step has not cached it.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import ds_ext
from benchmarks.host import made
from ds_ext.ops.executors.native.native_table import NativeTable, NormCache
from ds_ext.ops.executors.tables import AnyTable
from ds_ext.ops.executors.triton import devices, launches
from ds_ext.ops.executors.triton.kernel_table import KernelTable as KernelTable
from ds_ext.ops.runs import Call

SIDE = 256  # rows and columns of the stepped matrix
# Bytes of fp32 or 8-bit moments per element that a form reads and writes.
STATE = {"IS_ADAM_STEP": (8, 8), "IS_ADAM": (8, 0), "IS_RESIDUAL": (4, 4), "IS_SIGN_STEP": (4, 4)}
STATE |= {"IS_VECTOR": (4, 0), "IS_ADAM8_STEP": (2.125, 2.125)}
STATE |= {"IS_SIGN8_STEP": (1.0625, 1.0625)}
OVER_RUNS = {"square_sums", "row_col_sums", "weighted_sums", "lerp", "square_lerp", "apply"}
MOMENTS = {"lerp": 4, "square_lerp": 4}  # bytes read and written per element
ROUNDED = {"SPLIT": 2, "CORRECTED": 1}  # bytes of a master in addition to the 16-bit weight


def in_a_step(
    name: str, dtype: torch.dtype, is_fused: bool, by: str = "native"
) -> dict[str, float]:
    """Returns reads and writes per element in the third step, for "native" or "kernels"."""
    model = nn.Linear(SIDE, SIDE, bias=False, dtype=dtype)
    with asked_for() if by == "kernels" else contextlib.nullcontext():
        optimizer = made(name, list(model.parameters()))
        if is_fused:
            ds_ext.fuse_into_backward(model, optimizer)
        for _ in range(3):
            with counted(NativeTable if by == "native" else KernelTable) as found:
                model(torch.randn(3, SIDE, dtype=dtype)).float().square().sum().backward()
                optimizer.step()
            optimizer.zero_grad()
    size = dtype.itemsize
    numbers = {key: found[key] / SIDE**2 for key in KEYS}
    weights = size * (numbers["g"] + numbers["p read"] + numbers["p written"])
    moments = numbers["moments read"] + numbers["moments written"]
    return numbers | {"bytes": weights + moments}


KEYS = ("g", "p read", "p written", "moments read", "moments written")


@contextmanager
def counted(kind: type[AnyTable]) -> Iterator[Counter[str]]:
    """Context that counts elements of runs, and bytes of moments, that passes read and write."""
    found: Counter[str] = Counter()
    run: Any = kind.run

    def noted(self: AnyTable, call: Call, *args: Any) -> Any:
        reads_known = call.name == "square_sums" and _is_known(call.columns)
        if call.name in OVER_RUNS and not reads_known:
            of_each = self.entries["n"] if isinstance(self, NativeTable) else self.geometry.n
            count(found, call, int(of_each.sum()))
        return run(self, call, *args)

    with mock.patch.object(kind, "run", noted):
        yield found


@contextmanager
def asked_for() -> Iterator[None]:
    """Context in which CPU tensors are treated like GPU tensors, with kernels that do nothing."""
    with (
        mock.patch.object(devices, "DEVICES", {"cpu"}),
        mock.patch.object(launches, "launch_kernel", lambda *_: None),
    ):
        yield


def _is_known(columns: Any) -> bool:
    """Whether the sums of squares of the weights are cached."""
    cache = columns.get("norm_cache")
    return isinstance(cache, NormCache) and cache.are_valid


def count(found: Counter[str], call: Call, n: int) -> None:
    """Adds the elements that a pass on ``n`` elements reads and writes to ``found``."""
    name, _, form, dtype, storage, decays = call
    reads, writes = STATE.get(form, (0, 0))
    found["moments read"] += reads * n
    found["moments written"] += writes * n
    found["g"] += n if dtype is not None else 0
    if name == "apply":
        found["p read"] += n
        found["p written"] += n
        beside = ROUNDED.get(storage[0], 0) if storage else 0
        found["moments read"] += beside * n
        found["moments written"] += beside * n
    elif form == "IS_WEIGHT" or decays:
        found["p read"] += n
    if name in MOMENTS:
        found["moments read"] += MOMENTS[name] * n
        found["moments written"] += MOMENTS[name] * n
