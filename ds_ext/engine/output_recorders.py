"""transformers' register of what models record, as DeepSpeed's AutoEP asks it: by name.

From transformers 5.23 on it can be asked by model alone, and DeepSpeed 0.19.8, which asks by the
name of a class, ends in a TypeError.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_MODULE = "transformers.utils.output_capturing"
_REGISTER = "_CAN_RECORD_REGISTRY"


class _Register(dict[str, Any]):
    """A copy of the register that can be asked by model and, as a dict, by the name of a class."""

    def get(self, key: Any, default: Any = None) -> Any:
        if isinstance(key, str):
            return super().get(key, default)
        return super().get(str(type(key))) or {}


@contextlib.contextmanager
def readable_by_name() -> Iterator[None]:
    """Lets AutoEP ask the register by name within the context, if it could not.

    AutoEP takes back what it writes there, once the model's hooks are installed: the register
    itself stays as it is.
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
