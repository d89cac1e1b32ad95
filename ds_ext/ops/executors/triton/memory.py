"""Memory of a bucket's step on a GPU: taken from one piece for all that its launches need.

Sums that travel lie side by side, so that a round is one tensor of them as they are.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCRATCH, SUMS, HOST = range(3)
ALIGNMENT = 4  # numbers that scratch memory is taken in: 16 bytes
# Pieces that sums are taken from, by their addresses.
_of_sums: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class Memory:
    """Where launches take what they need on a device: tables, partial sums, factors, sums.

    Args:
        device: where it lies.
        sizes: of the pieces that are made when memory is first asked for: numbers of scratch, of
            sums, and words of 8 bytes on the host. What is not in them is made when it is needed.

    Attributes:
        used: what has been taken of each.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int] = (0, 0, 0)) -> None:
        self.device, self.sizes = device, tuple(sizes)
        self.used = [0, 0, 0]
        self._pieces: list[Tensor | None] = [None, None, None]

    def scratch(self, n: int) -> Tensor:
        """Returns n numbers of any values, [n] in fp32, from a multiple of 16 bytes on."""
        return self._take(SCRATCH, n, -(-n // ALIGNMENT) * ALIGNMENT)

    def sums(self, n: int) -> Tensor:
        """Returns n zeros, [n] in fp32, beside those of the call before."""
        return self._take(SUMS, n, n)

    def host(self, words: int) -> Tensor:
        """Returns memory of the host that is copied from without waiting, [words] in int64."""
        return self._take(HOST, words, words)

    def _take(self, which: int, n: int, room: int) -> Tensor:
        start = self.used[which]
        self.used[which] += room
        if self.used[which] > self.sizes[which]:
            return self._made(which, n)
        piece = self._pieces[which]
        if piece is None:
            piece = self._pieces[which] = self._made(which, self.sizes[which])
            if which == SUMS:
                _of_sums[piece.data_ptr()] = piece
        return piece[start : start + n]

    def _made(self, which: int, n: int) -> Tensor:
        if which == HOST:
            is_pinned = self.device.type == "cuda"
            return torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        make = torch.zeros if which == SUMS else torch.empty
        return make(n, dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class Addresses:
    """Places in a tensor, which it keeps alive."""

    values: Tensor
    starts: NDArray[np.int64]  # bytes

    @property
    def pointers(self) -> NDArray[np.int64]:
        """Where each is in memory, [n]."""
        return self.values.data_ptr() + self.starts


def joined(sums: Sequence[Tensor]) -> Tensor | None:
    """Returns the memory that sums fill, flat [n], if it was taken for them side by side."""
    ordered = sorted(sums, key=Tensor.data_ptr)
    first = ordered[0]
    piece = _of_sums.get(first.untyped_storage().data_ptr())
    if piece is None:
        return None
    start = end = (first.data_ptr() - piece.data_ptr()) // 4
    for x in ordered:
        if x.data_ptr() != piece.data_ptr() + 4 * end or not x.is_contiguous():
            return None
        end += x.numel()
    return piece[start:end]
