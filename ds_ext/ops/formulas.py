"""Lazy numbers of a batch, one per parameter, which kernels evaluate.

On a GPU only the device knows sums over ranks. A rule's scalar, such as ``lr · RMS(p)``, is a
``Formula`` that the kernel evaluates, so torch launches no operations for it.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A formula without its numbers: ("given", index of the number), or (operation, operands, …).
Structure: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Formula:
    """An operation on formulas and numbers, with the names and the rounding of torch.

    Attributes:
        name: "given", or one of ``OPERATIONS``.
        of: the operands: formulas, floats and tensors; for "given" a tensor [n] on the device.
    """

    name: str
    of: tuple[Any, ...]

    @classmethod
    def given(cls, values: Tensor) -> "Formula":
        """Returns existing numbers, [n], as a formula."""
        return cls("given", (values,))

    @property
    def values(self) -> Tensor:
        """The numbers of a "given" formula, [n]."""
        assert self.name == "given"
        values: Tensor = self.of[0]
        return values

    def __add__(self, other: Any) -> "Formula":
        return Formula("add", (self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Formula":
        return Formula("sub", (self, other))

    def __rsub__(self, other: Any) -> "Formula":
        return Formula("sub", (other, self))

    def __neg__(self) -> "Formula":
        return Formula("sub", (0.0, self))

    def __abs__(self) -> "Formula":
        return self.where(self > 0.0, -self)

    abs = __abs__

    def __pow__(self, exponent: int | float) -> "Formula":
        """Returns the power ±1/2, or an integer power by products, which round unlike torch's."""
        if exponent < 0:
            return 1.0 / self**-exponent
        if exponent == 0.5:
            return self.sqrt()
        assert exponent == int(exponent) > 0, f"a formula has no power {exponent}"
        found = self
        for _ in range(int(exponent) - 1):
            found = found * self
        return found

    def square(self) -> "Formula":
        """Returns the square."""
        return self * self

    def reciprocal(self) -> "Formula":
        """Returns the reciprocal."""
        return 1.0 / self

    def rsqrt(self) -> "Formula":
        """Returns 1 / the square root."""
        return 1.0 / self.sqrt()

    def __lt__(self, other: Any) -> "Formula":
        return Formula("gt", (other, self))

    def __mul__(self, other: Any) -> "Formula":
        return Formula("mul", (self, other))

    def __rmul__(self, other: Any) -> "Formula":
        return Formula("mul", (other, self))

    def __truediv__(self, other: Any) -> "Formula":
        return Formula("div", (self, other))

    def __rtruediv__(self, other: Any) -> "Formula":
        return Formula("div", (other, self))

    def __gt__(self, other: Any) -> "Formula":
        return Formula("gt", (self, other))

    def __and__(self, other: Any) -> "Formula":
        return Formula("and", (self, other))

    def sqrt(self) -> "Formula":
        """Returns the square root."""
        return Formula("sqrt", (self,))

    def clamp(self, min: float | None = None, max: float | None = None) -> "Formula":
        """Returns the number clamped to the bounds; NaN stays NaN."""
        found = self if min is None else Formula("at_least", (self, min))
        return found if max is None else Formula("at_most", (found, max))

    def where(self, condition: "Formula", other: Any) -> "Formula":
        """Returns this number where ``condition`` holds, else ``other``."""
        return Formula("where", (condition, self, other))

    def minimum(self, other: Any) -> "Formula":
        """Returns the smaller number."""
        return Formula("at_most", (self, other))

    def maximum(self, other: Any) -> "Formula":
        """Returns the larger number."""
        return Formula("at_least", (self, other))

    def evaluated(self) -> Tensor:
        """Returns the numbers, [n], computed by torch's operations."""
        if self.name == "given":
            return self.values
        return OPERATIONS[self.name](*(_evaluated(x) for x in self.of))

    def taken_apart(self, numbers: list[Tensor | float]) -> Structure:
        """Returns its structure; appends its numbers to ``numbers``, each tensor once."""
        if self.name == "given":
            return _taken_apart(self.values, numbers)
        return self.name, *(_taken_apart(x, numbers) for x in self.of)


# The operations in torch; kernels/table_access.py has them for kernels.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "sqrt": torch.sqrt,
    "at_least": lambda x, bound: x.where(~(x < bound), bound),
    "at_most": lambda x, bound: x.where(~(x > bound), bound),
    "gt": operator.gt,
    "and": operator.and_,
    "where": torch.where,
}


def _evaluated(x: Any) -> Any:
    return x.evaluated() if isinstance(x, Formula) else x


def _taken_apart(x: Any, numbers: list[Tensor | float]) -> Structure:
    if isinstance(x, Formula):
        return x.taken_apart(numbers)
    if isinstance(x, Tensor):
        for i, known in enumerate(numbers):
            if known is x:
                return ("given", i)
    numbers.append(x)
    return ("given", len(numbers) - 1)
