"""Constants of kernels as JSON has them."""

import importlib
from typing import Any

from ds_ext.ops.executors.triton.launches import KernelConstants


def plain(value: Any) -> Any:
    """Returns a constant in plain types: a dtype by its name."""
    if isinstance(value, KernelConstants):
        return {name: plain(x) for name, x in value.fields.items()}
    return getattr(value, "name", value)


def given(value: Any) -> Any:
    """Returns the inverse of ``plain``."""
    if isinstance(value, dict):
        return KernelConstants(**{name: given(x) for name, x in value.items()})
    tl = importlib.import_module("triton.language")
    types = {t.name: t for t in (tl.float32, tl.bfloat16, tl.float16, tl.int16, tl.int8)}
    return types.get(value, value)
