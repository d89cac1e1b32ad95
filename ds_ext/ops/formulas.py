"""Numbers of a batch, one for each parameter, that a pass computes where it needs them.

On a GPU sums over ranks are known to the device alone. What a rule makes of them, as ``lr ·
RMS(p)``, is a ``Formula`` that goes to the kernel: no operation of torch is launched for it.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

# What a formula is, without its numbers: ("given", which), or (operation, what it is of, …).
Structure: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Formula:
    """An operation on formulas and numbers, with the names and the rounding that torch has.

    Attributes:
        name: "given", "mul", "div", "sqrt", "at_least", "at_most", "gt", "and" or "where".
        of: what it is of: formulas and floats; where it is given a tensor [n] of the device.
    """

    name: str
    of: tuple[Any, ...]

    @classmethod
    def given(cls, values: Tensor) -> "Formula":
        """Returns numbers that are there, [n]."""
        return cls("given", (values,))

    @property
    def values(self) -> Tensor:
        """The numbers of a formula that has them as they are, [n]."""
        assert self.name == "given"
        values: Tensor = self.of[0]
        return values

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
        """Returns the number within bounds; a NaN stays one."""
        found = self if min is None else Formula("at_least", (self, min))
        return found if max is None else Formula("at_most", (found, max))

    def where(self, condition: "Formula", other: Any) -> "Formula":
        """Returns the number where a condition holds, and the other one elsewhere."""
        return Formula("where", (condition, self, other))

    def taken_apart(self, numbers: list[Tensor | float]) -> Structure:
        """Returns its structure; adds the numbers that it is of, each tensor once, to a list."""
        if self.name == "given":
            return _taken_apart(self.values, numbers)
        return self.name, *(_taken_apart(x, numbers) for x in self.of)


def _taken_apart(x: Any, numbers: list[Tensor | float]) -> Structure:
    if isinstance(x, Formula):
        return x.taken_apart(numbers)
    if isinstance(x, Tensor):
        for i, known in enumerate(numbers):
            if known is x:
                return ("given", i)
    numbers.append(x)
    return ("given", len(numbers) - 1)
