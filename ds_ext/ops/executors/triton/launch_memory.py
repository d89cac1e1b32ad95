"""Memory of a bucket's step on a GPU: three buffers serve all of its launches.

They are scratch, sums, and pinned host memory. Each is as large as the largest step of the bucket
needed so far. One copy brings the arrays of integers that the launches of a step read.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops.runs import Columns

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
        """Returns zeros, [n] in fp32."""
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


class DeviceArrays:
    """A batch's part of a bucket's step, with its arrays on the device, found by their contents.

    A step begins with one copy: of the arrays that the step before has used, because nearly all are
    the same, and of those that are known to be new. Others are copied when a launch needs them.

    Args:
        memory: of the step in progress; None: passes are not part of a bucket's step.

    Attributes:
        limits: columns by which programs skip parameters with bad gradients: ``found`` and
            ``most``; {}: all are good.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory
        self.limits: Columns = {}
        self._used: dict[bytes, None] = {}
        self._addresses: dict[bytes, int] = {}
        self._alive: list[Tensor] = []  # what is at these addresses

    def begin(self, known: Iterable[bytes]) -> None:
        """Begins a step in ``memory``, whose launches will need the arrays ``known``."""
        contents = self._used | dict.fromkeys(known)
        self._used, self._addresses, self._alive = {}, {}, []
        self._copy(contents)

    def end(self) -> None:
        """Forgets the memory of a step; its launches run before it is used again."""
        self.memory, self.limits = None, {}
        self._addresses, self._alive = {}, []

    def addresses(self, contents: Sequence[bytes]) -> list[int]:
        """Returns where arrays lie on the device; copies those that are not there."""
        missing = [x for x in dict.fromkeys(contents) if x not in self._addresses]
        if missing:
            self._copy(missing)
        self._used |= dict.fromkeys(contents)
        return [self._addresses[x] for x in contents]

    def _copy(self, contents: Iterable[bytes]) -> None:
        assert self.memory is not None, "no step is in progress"
        text = b"".join(contents)
        host = self.memory.host(len(text) // 8)
        host.numpy()[:] = np.frombuffer(text, dtype=np.int64)
        held = self.memory.scratch(len(text) // 4).view(torch.int64)
        held.copy_(host, non_blocking=True)
        self._alive.append(held)
        at = held.data_ptr()
        for x in contents:
            self._addresses[x] = at
            at += len(x)
