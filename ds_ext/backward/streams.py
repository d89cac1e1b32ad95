"""The side stream, on which a GPU reduces and steps gradients in parallel with backward.

On a CPU, collectives run in the threads of their process group, and the rest runs in line.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream for work in parallel with the current stream; none without ``overlap``."""

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None

    def wait_for_current(self, tensors: Iterable[Tensor]) -> None:
        """Makes the side stream wait for the current stream, which has computed ``tensors``."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            for x in tensors:
                x.record_stream(self.stream)  # so that their memory is not reused too early

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context whose launches run on the side stream."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def make_current_wait(self) -> None:
        """Makes the current stream wait for the side stream; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


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
