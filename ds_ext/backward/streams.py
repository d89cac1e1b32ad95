"""The streams on which a GPU reduces and steps gradients in parallel with backward.

Each bucket is reduced on one stream and stepped on another. The first waits only for backward, so a
reduction never waits for a step. The second waits for the reduction of its own bucket.

On a CPU, collectives run in the threads of their process group. All other work runs in the calling
thread.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WITH_STREAMS = {"cuda"}  # types of devices
IN_FLIGHT = 2  # buckets whose memory is in use by these streams while the next one fills


class SideStreams:
    """Two CUDA streams for work in parallel with the current stream.

    The allocator may reuse a freed tensor on the current stream while a side stream still reads it.
    ``hold`` therefore keeps a reference until the current stream has waited for the last kernel
    that reads the tensor. The current stream waits before more than ``IN_FLIGHT`` buckets are held,
    which bounds the memory of gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: deque[tuple[object, Any]] = deque()  # tensors, the event after their last use
        self._reducing, self._stepping = (torch.cuda.Stream(device) for _ in range(2))

    def reducing(self) -> contextlib.AbstractContextManager[object]:
        """A context whose launches wait for the current stream. They do not wait for steps."""
        self._reducing.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._reducing)

    def reduced(self) -> Callable[[], None]:
        """Marks the end of a reduction; returns a function that makes steps wait for it."""
        event = self._reducing.record_event()
        return lambda: self._stepping.wait_event(event)

    def stepping(self) -> contextlib.AbstractContextManager[object]:
        """A context whose launches run after those of earlier steps."""
        return torch.cuda.stream(self._stepping)

    def hold(self, tensors: object) -> None:
        """Keeps tensors of a bucket in memory until its step has ended."""
        self._held.append((tensors, self._stepping.record_event()))

    def make_room(self, buckets: int) -> None:
        """Makes the current stream wait until at most ``buckets`` are held; the host goes on."""
        while len(self._held) > buckets:
            _, event = self._held.popleft()
            torch.cuda.current_stream(self.device).wait_event(event)

    def make_current_wait(self) -> None:
        """Makes the current stream wait for all steps; the host does not wait."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._reducing)
        current.wait_stream(self._stepping)
        self._held.clear()


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Starts to copy ``x`` to the host; returns a function that waits for the copy."""
    if x.device.type != "cuda":
        return lambda: x.cpu()
    held = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    held.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def arrived() -> Tensor:
        event.synchronize()
        return held

    return arrived


def from_host(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers as a tensor on ``device``; the host does not wait for the copy to a GPU."""
    held = torch.tensor(numbers, dtype=dtype, device="cpu")
    return held.to(device, non_blocking=True)  # CUDA stages up to 64 KiB, so they need no pinning


def synchronize(device: torch.device) -> None:
    """Waits for copies from ``device`` to the host, so that any code may read them."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
