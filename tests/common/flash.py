"""flashoptim on any device: where there is no GPU, its kernels run in Triton's interpreter."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import triton.language as tl
from flashoptim import optimizers as flashoptim

FlashAdamW, FlashLion = flashoptim.FlashAdamW, flashoptim.FlashLion


@contextlib.contextmanager
def runnable() -> Iterator[None]:
    """Makes the optimizers of flashoptim, and steps them, here.

    On a CPU it says that tensors are a GPU's, and puts in what the interpreter does not have: the
    number of processors, two functions of CUDA's library, and times to choose sizes of blocks by.
    """
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.Tensor, "is_cuda", True),
            (flashoptim, "_get_sm_count", lambda device=None: 1),
            (flashoptim, "libdevice", SimpleNamespace(pow=_power, copysign=_copysign)),
            *((kernel, "configs", kernel.configs[:1]) for kernel in TUNED),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield


TUNED = (flashoptim._triton_quantize_kernel, flashoptim._triton_dequantize_kernel)


def _power(base: float, exponent: tl.tensor) -> float:
    return base ** int(exponent.handle.data.item())


def _copysign(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    return tl.where(like < 0, -x, x)
