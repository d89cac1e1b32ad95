"""What a kernel is compiled for, where that has structure: passes, kinds of passes, formulas."""

import hashlib
from typing import Any


class Spec:
    """A constant of a kernel with named fields, some of which are such constants too.

    A kernel reads its fields; Triton tells one from another by ``repr``, of which it makes names.
    A tuple would not do: not all versions of Triton take tuples of tuples.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        text = ", ".join(f"{name}={value!r}" for name, value in sorted(fields.items()))
        self._name = "of_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a kernel is not told {name}: it has {', '.join(self.fields)}")

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)
