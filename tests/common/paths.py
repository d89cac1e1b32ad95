"""By what the passes over memory are made: native code, kernels in their interpreter, torch ops."""

import functools
from typing import Any
from unittest import mock

import pytest

from ds_ext.ops.executors.native import library, table
from ds_ext.ops.executors.triton import devices
from ds_ext.optimizer import first_round

_comes_first = first_round._comes_first


def use(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Makes "native", "kernels" or "ops" step tensors of the CPU, of optimizers made from now."""
    is_native = path == "native"
    assert not is_native or library.load() is not None, "no C++ compiler"
    monkeypatch.setattr(devices, "DEVICES", {"cpu"} if path == "kernels" else set())
    monkeypatch.setattr(table, "is_there", lambda: is_native)
    monkeypatch.setattr(first_round, "_comes_first", _by_ops)


@functools.wraps(_comes_first)
def _by_ops(*args: Any) -> bool:
    """Tries a rule by torch's operations, as tensors of the CPU are beside a GPU: they count."""
    with mock.patch.object(devices, "DEVICES", set()):
        return _comes_first(*args)
