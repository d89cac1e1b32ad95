"""Compiles launches into Triton's cache: ``python -m benchmarks.gpu.compiler 90``, JSON on stdin.

No GPU is needed, because Triton's driver is replaced by one that knows only the architecture. A
process with a driver would need memory on the GPU. Prints a line for each kernel that does not
compile.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu.compiling import given
from ds_ext.ops.executors.triton import kernels, launches
from ds_ext.ops.executors.triton.columns import ARGUMENTS


class Driver:
    """What Triton asks of a driver before it compiles.

    Args:
        architecture: such as 90.
    """

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(asked: Iterable[tuple[int, dict[str, Any]]], architecture: int) -> None:
    """Compiles (warps, constants)."""
    triton.runtime.driver.set_active(Driver(architecture))
    for warps, written in asked:
        named = {name: given(x) for name, x in written.items()}
        try:
            kernels.run.warmup(*[0] * ARGUMENTS, grid=(1,), **named, **launches.options(warps))
        except Exception as error:
            print(json.dumps(written), " ".join(repr(error).split())[-500:], flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin), int(sys.argv[1]))
