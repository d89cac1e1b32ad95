"""Where the data of a batch's parameters lies: an address for each parameter."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.read_by_passes import ReadByPasses

Pointers: TypeAlias = NDArray[np.int64]
# The arguments of a pass by column: ``Runs``, numbers, vectors [n], and objects that a table knows.
Columns: TypeAlias = dict[str, Any]


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

    def shifted(self, by: Pointers | int) -> "Runs":
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
