"""Arrays of integers that the launches of a step read, which one copy brings to the device."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops.executors.triton.launch_memory import Memory


class DeviceArrays:
    """The arrays of a batch's steps on the device, found by their contents.

    A step begins with one copy: of the arrays that the step before has used, because nearly all are
    the same, and of those that are known to be new. Others are copied when a launch needs them.
    """

    def __init__(self) -> None:
        self._used: dict[bytes, None] = {}
        self._addresses: dict[bytes, int] = {}
        self._alive: list[Tensor] = []  # what is at these addresses

    def begin(self, memory: Memory, known: Iterable[bytes]) -> None:
        """Begins a step.

        Args:
            memory: of the step.
            known: arrays that its launches will need.
        """
        contents = self._used | dict.fromkeys(known)
        self.end()
        self._used = {}
        self._copy(memory, contents)

    def end(self) -> None:
        """Forgets the memory of a step; its launches run before it is used again."""
        self._addresses, self._alive = {}, []

    def addresses(self, memory: Memory, contents: Sequence[bytes]) -> list[int]:
        """Returns where arrays lie on the device; copies those that are not there."""
        missing = [x for x in dict.fromkeys(contents) if x not in self._addresses]
        if missing:
            self._copy(memory, missing)
        self._used |= dict.fromkeys(contents)
        return [self._addresses[x] for x in contents]

    def _copy(self, memory: Memory, contents: Iterable[bytes]) -> None:
        text = b"".join(contents)
        host = memory.host(len(text) // 8)
        host.numpy()[:] = np.frombuffer(text, dtype=np.int64)
        held = memory.scratch(len(text) // 4).view(torch.int64)
        held.copy_(host, non_blocking=True)
        self._alive.append(held)
        at = held.data_ptr()
        for x in contents:
            self._addresses[x] = at
            at += len(x)
