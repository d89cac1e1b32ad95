"""What a pass reads and writes, as a kernel sees it: tensors, numbers and the form they are in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

Number: TypeAlias = Tensor | float  # a tensor [] is read on the device when the kernel runs


@dataclass(frozen=True)
class Kept:
    """A weight that a kernel can read and write."""

    run: Tensor
    how: str = "PLAIN"  # or STOCHASTIC, SPLIT, COPIED, CORRECTED: see weight_forms.py
    aux: Tensor | None = None
    key: int = 0
    start: int | None = None  # element of the parameter that the run starts at; None: its shard's

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Returns its tensors by their columns of the table."""
        return {"w": self.run} | ({} if self.aux is None else {"aux": self.aux})


@dataclass(frozen=True)
class Source:
    """What a pass reads: a form of kernels/values.py, and what that needs."""

    form: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    kept: Kept | None = None  # weights that are read: as IS_WEIGHT, or added · decay

    def plus(self, form: str, tensors: Mapping[str, Tensor], **numbers: Number) -> "Source":
        """Returns the same in a form that needs more."""
        return replace(
            self,
            form=form,
            tensors={**self.tensors, **tensors},
            numbers={**self.numbers, **numbers},
        )

    @property
    def is_by_matrix(self) -> bool:
        """Whether what is read depends on the row and column that an element lies in."""
        return self.form in ("IS_QUOTIENT", "IS_RESIDUAL")

    def within(self, rows: slice, cols: slice) -> "Source":
        """Returns what is read of these rows and columns of each matrix."""
        tensors = dict(self.tensors)
        if "row" in tensors:
            tensors["row"] = tensors["row"][:, rows]
        if "col" in tensors:
            tensors["col"] = tensors["col"][..., cols]
        return replace(self, tensors=tensors)


def source_of(x: Any) -> Source | None:
    """What a run is to a kernel; None if no kernel can read it."""
    if isinstance(x, Tensor):
        return Source("IS_RUN", {"x": x})
    if hasattr(x, "kept"):
        return Source("IS_WEIGHT", kept=x.kept())
    return x.source() if hasattr(x, "source") else None


def kept_of(p: Any) -> Kept | None:
    """What a weight is to a kernel; None if no kernel can write it."""
    if isinstance(p, Tensor):
        return Kept(p)
    return p.kept() if hasattr(p, "kept") else None
