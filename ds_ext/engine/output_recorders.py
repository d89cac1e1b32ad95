"""Lets DeepSpeed's AutoEP look up transformers' registry of recorded outputs by class name.

Since transformers 5.23 the registry accepts only models as keys. DeepSpeed 0.19.8 passes the name
of a class, which raises TypeError.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_MODULE = "transformers.utils.output_capturing"
_REGISTER = "_CAN_RECORD_REGISTRY"


class _Register(dict[str, Any]):
    """A copy of the registry that accepts both models and names of classes."""

    def get(self, key: Any, default: Any = None) -> Any:
        if isinstance(key, str):
            return super().get(key, default)
        return super().get(str(type(key))) or {}


@contextlib.contextmanager
def readable_by_name() -> Iterator[None]:
    """Context in which AutoEP can look up the registry by name.

    The original registry does not change: AutoEP removes its entries again after it has installed
    the model's hooks.
    """
    module = sys.modules.get(_MODULE)
    register = getattr(module, _REGISTER, None)
    if register is None or _is_readable(register):
        yield
        return
    setattr(module, _REGISTER, _Register(register))
    try:
        yield
    finally:
        setattr(module, _REGISTER, register)


def _is_readable(register: dict[str, Any]) -> bool:
    try:
        return register.get("", register) is register
    except TypeError:
        return False
