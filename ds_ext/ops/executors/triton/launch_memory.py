"""Memory of a bucket's step on a GPU: three buffers serve all of its launches.

They are scratch, sums, and pinned host memory. Each is as large as the largest step of the bucket
needed so far. Sums over ranks lie next to each other, so a round reduces them in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SCRATCH, SUMS, HOST = range(3)
ALIGNMENT = 4  # elements, of scratch memory: 16 bytes


class Memory:
    """Allocates the memory of launches: arrays of integers, partial sums, factors, sums.

    Args:
        device: the device of the launches.
        sizes: the sizes of three buffers, each allocated at its first use: elements of scratch,
            elements of sums, and 8-byte words on the host. Requests beyond a buffer's size get
            memory of their own.

    Attributes:
        used: the size of all requests so far, for each buffer.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int] = (0, 0, 0)) -> None:
        self.device, self.sizes = device, tuple(sizes)
        self.used = [0, 0, 0]
        self._pieces: list[Tensor | None] = [None, None, None]

    def scratch(self, n: int) -> Tensor:
        """Returns uninitialized memory aligned to 16 bytes, [n] in fp32."""
        return self._take(SCRATCH, n, -(-n // ALIGNMENT) * ALIGNMENT)

    def sums(self, n: int) -> Tensor:
        """Returns zeros that follow those of the previous call in memory, [n] in fp32."""
        return self._take(SUMS, n, n)

    def host(self, words: int) -> Tensor:
        """Returns host memory, pinned for a GPU, [words] in int64."""
        return self._take(HOST, words, words)

    def _take(self, which: int, n: int, size: int) -> Tensor:
        start = self.used[which]
        self.used[which] += size
        if self.used[which] > self.sizes[which]:
            return self._made(which, n)
        piece = self._pieces[which]
        if piece is None:
            piece = self._pieces[which] = self._made(which, self.sizes[which])
        return piece[start : start + n]

    def _made(self, which: int, n: int) -> Tensor:
        if which == HOST:
            is_pinned = self.device.type == "cuda"
            return torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        make = torch.zeros if which == SUMS else torch.empty
        return make(n, dtype=torch.float32, device=self.device)

    def contiguous_span(self, sums: Sequence[Tensor]) -> Tensor | None:
        """Returns the part of the buffer of sums that ``sums`` fill, flat [n].

        None if they are not adjacent in it.
        """
        piece = self._pieces[SUMS]
        if piece is None:
            return None
        ordered = sorted(sums, key=Tensor.data_ptr)
        start = end = (ordered[0].data_ptr() - piece.data_ptr()) // 4
        for x in ordered:
            if x.data_ptr() != piece.data_ptr() + 4 * end or not x.is_contiguous():
                return None
            end += x.numel()
        return piece[start:end] if 0 <= start and end <= len(piece) else None
