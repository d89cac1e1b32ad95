"""By what the passes over memory are made: native code, kernels in their interpreter, torch ops."""

import pytest

from ds_ext.ops.executors.native import library, table
from ds_ext.ops.executors.triton import devices


def use(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Makes "native", "kernels" or "ops" step tensors of the CPU, of optimizers made from now."""
    is_native = path == "native"
    assert not is_native or library.load() is not None, "no C++ compiler"
    monkeypatch.setattr(devices, "DEVICES", {"cpu"} if path == "kernels" else set())
    monkeypatch.setattr(table, "is_available", lambda: is_native)
