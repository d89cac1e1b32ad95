"""A pytest plugin that runs Triton kernels by executing their compiled IR on the CPU.

    make ir                       # the tests of kernels; ARGS="-k came" for a part
    pytest -p tests.tools.ir ...  # with ttsem on PYTHONPATH

Without it, the tests run kernels in Triton's interpreter, which executes Python. Here Triton
compiles each launch for sm_90, and ttsem (PyPI) executes its TTIR as one program after another. A
race between programs, an access outside of a live tensor, and an operation without a defined
result raise an error in the test that launched the kernel. The end of the report counts launches,
and those with too many accesses to be checked for races.

ttsem knows only the tensors that are arguments of a launch. Our kernels read addresses in tables,
so the plugin gives it the memory of all tensors that are alive when a kernel is launched.
"""

import contextlib
import ctypes
import gc
import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "0"

from ttsem import ops, sanitize  # noqa: E402
from ttsem.memory import Memory, MemoryFault  # noqa: E402


class LiveMemory:
    """The storages of the tensors on the CPU that were alive at the last launch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def refresh(self) -> None:
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        memory = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
        storages = {own.data_ptr(): own.nbytes() for own in memory}
        self.starts = sorted(storages)
        self.ends = [start + storages[start] for start in self.starts]

    def bytes_at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory around ``addresses`` and the place of each byte of their elements in it."""
        lowest, end = int(addresses.min()), int(addresses.max()) + size
        place = np.searchsorted(self.starts, addresses, side="right") - 1
        ends = np.asarray(self.ends, dtype=np.int64)[np.maximum(place, 0)]
        outside = (place < 0) | (addresses + size > ends)
        if outside.any():
            bad = addresses[outside]
            raise MemoryFault(int(bad[0]), bad, size)
        view = np.ctypeslib.as_array((ctypes.c_uint8 * (end - lowest)).from_address(lowest))
        return view, (addresses - lowest)[:, None] + np.arange(size)


LIVE = LiveMemory()
_read, _write = Memory._read, Memory._write


def read(self: Memory, addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As ``Memory._read``, also of live tensors that are no arguments of the launch."""
    try:
        return _read(self, addresses, dtype)
    except MemoryFault:
        try:
            view, places = LIVE.bytes_at(addresses, dtype.itemsize)
        except MemoryFault as fault:
            fault.kind = "read"
            raise
        return np.ascontiguousarray(view[places]).view(dtype).reshape(-1)


def write(self: Memory, addresses: np.ndarray, values: np.ndarray) -> None:
    """As ``Memory._write``, also of live tensors that are no arguments of the launch."""
    try:
        _write(self, addresses, values)
    except MemoryFault:
        try:
            view, places = LIVE.bytes_at(addresses, values.dtype.itemsize)
        except MemoryFault as fault:
            fault.kind = "write"
            raise
        view[places] = np.ascontiguousarray(values).view(np.uint8).reshape(addresses.size, -1)


def approximate_reciprocal(x: object) -> list[np.ndarray]:
    """1 / x, off by one unit in the last place at two of three values, as a GPU's may be."""
    x = np.asarray(x, np.float32)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        exact = (np.float32(1.0) / x).astype(np.float32)
    off = (x.view(np.uint32) % 3).astype(np.int32) - 1
    moved = (exact.view(np.int32) + off).view(np.float32)
    return [np.where(np.isfinite(exact) & (exact != 0), moved, exact)]


class Plugin:
    """Executes the IR of all launches of a session of pytest."""

    def __init__(self) -> None:
        self.resources = contextlib.ExitStack()
        has_gpu = torch.cuda.is_available
        self.state = self.resources.enter_context(
            sanitize.session(cuda_is_cpu=False, on_launch=lambda count: LIVE.refresh())
        )
        torch.cuda.is_available = has_gpu  # ttsem says that there is one

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.line(
            f"{self.state.launches} launches executed from their compiled IR, "
            f"{self.state.races_unchecked} of them not checked for races"
        )

    def pytest_unconfigure(self) -> None:
        self.resources.close()


def pytest_configure(config: pytest.Config) -> None:
    Memory._read, Memory._write = read, write
    ops.PTX_FRAGMENTS["rcp.approx.ftz.f32 $0, $1;"] = (approximate_reciprocal, "div")
    config.pluginmanager.register(Plugin())
