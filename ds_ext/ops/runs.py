"""Where the data of a batch's parameters lies, which only passes read: see ``ReadByPasses``."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "getitem", "setitem"),
)


class ReadByPasses:
    """A base class of runs that are no tensors: torch's operations raise an error that says so."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raises TypeError. Torch calls it for its functions and for methods of tensors."""
        raise TypeError(_message(getattr(function, "__name__", str(function))))

    if not TYPE_CHECKING:  # else a type checker believes that it has every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError. Python calls it for attributes that do not exist."""
            if name.startswith("__") or not hasattr(Tensor, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(_message(name))


def _message(operation: str) -> str:
    return (
        f"Torch's {operation} cannot read it: p and g of a rule, and in a batch its state too, are "
        "no tensors, because a pass scales, unscales and rounds them block by block. Use functions "
        'of ds_ext.ops, such as ops.lerp_(s["m"], g, 1 - beta, shard), whose m, times '
        "1 / (1 - beta), is the m of m = beta * m + g; or write an expression with ops.read(g, b) "
        "in its method block. A rule that computes with other states, such as a Part.whole, leaves "
        "is_batched out: docs/adding-an-optimizer.md."
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(*_: object) -> NoReturn:
        raise TypeError(_message(name))

    return operator


for _name in _OPERATORS:
    setattr(ReadByPasses, f"__{_name}__", _refused(f"__{_name}__"))


Pointers: TypeAlias = NDArray[np.int64]
# The arguments of a pass by column: ``Runs``, numbers, vectors [n], and objects that a table knows.
Columns: TypeAlias = dict[str, Any]


class Call(NamedTuple):
    """A pass over all parameters of a table."""

    name: str  # one of schema.PASSES
    columns: Columns
    form: str = "IS_WEIGHT"  # of the input, one of schema.FORMS
    dtype: torch.dtype | None = None  # of ``x``, one of schema.DTYPES
    storage: tuple[str, torch.dtype] | None = None  # of weights, one of schema.STORED
    decays: bool = False  # whether to add ``decay`` times the weights to the input


class Layout(NamedTuple):
    """What the contiguous tensors of ``Runs`` have in common, and their sizes."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]  # elements of each tensor


class Runs(ReadByPasses):
    """A flat run of each parameter of a batch. All have one dtype; each may lie anywhere.

    Args:
        tensors: a tensor for each parameter, or one tensor of fp32 that has the runs of all.
        layout: the layout of a tensor for each parameter, if it is known.
        firsts: the index of each run's first number in that one tensor, [n].

    Attributes:
        base: an address.
        is_checked: whether a pass made the runs, so that other passes need not check them.
    """

    base = 0
    is_checked = False
    # Computed when they are first read; functools.cached_property takes a lock.
    _layout: Layout | None = None
    _offsets: Pointers | None = None
    _pointers: Pointers | None = None

    def __init__(
        self,
        tensors: Sequence[Tensor],
        layout: Layout | None = None,
        firsts: Pointers | None = None,
    ) -> None:
        self.tensors = tensors
        if layout is not None:
            self._layout = layout
        if firsts is not None:
            self.base, self._offsets, self.is_checked = tensors[0].data_ptr(), 4 * firsts, True

    @classmethod
    def at(cls, base: int, offsets: Pointers, tensors: Sequence[Tensor] = ()) -> "Runs":
        """Returns runs at addresses in memory that the caller, or ``tensors``, keeps alive."""
        runs = cls(tensors)
        runs.base, runs._offsets, runs.is_checked = base, offsets, True
        return runs

    def shifted(self, by: Pointers) -> "Runs":
        """Returns runs that begin later, by bytes, [n]."""
        return Runs.at(self.base, self.offsets + by, self.tensors)

    @property
    def layout(self) -> Layout | None:
        """The layout; None if a tensor is not contiguous, or dtypes or devices differ."""
        if self._layout is None:
            first, sizes = self.tensors[0], []
            dtype, device = first.dtype, first.device
            for x in self.tensors:
                if x.dtype != dtype or x.device != device or not x.is_contiguous():
                    return None
                sizes.append(x.numel())
            self._layout = Layout(dtype, device, tuple(sizes))
        return self._layout

    @property
    def offsets(self) -> Pointers:
        """The address of each parameter's first element less ``base``, in bytes, [n]."""
        if self._offsets is None:
            self._offsets = np.array([x.data_ptr() for x in self.tensors], dtype=np.int64)
        return self._offsets

    @property
    def pointers(self) -> Pointers:
        """The address of each parameter's first element, [n]."""
        if self._pointers is None:
            self._pointers = self.base + self.offsets if self.base else self.offsets
        return self._pointers

    @property
    def values(self) -> Tensor:
        """The tensor that has all runs."""
        (values,) = self.tensors
        return values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors[0].device

    def contiguous(self) -> "Runs":
        """Returns itself, as a contiguous tensor does."""
        return self
