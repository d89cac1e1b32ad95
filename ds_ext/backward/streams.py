"""Work beside backward: on a GPU on a stream of its own, so that neither waits for the other.

On a CPU collectives run in the threads of their process group, and the rest in line.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


class Beside:
    """A place for work that runs beside what the device does otherwise, in its own order."""

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Lets this work begin after what was launched so far, which made ``tensors``."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            for x in tensors:
                x.record_stream(self.stream)  # their memory is not used again before

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """What is launched within runs beside."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def join(self) -> None:
        """Lets what is launched from now on begin after this work; the host waits for nothing."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Starts to bring ``x`` to the host -> what waits for that alone, and gives it."""
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
