"""By what the passes over memory are made: native code, kernels, torch ops; and on which device."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ds_ext.ops import products
from ds_ext.ops.executors import unbatched
from ds_ext.ops.executors.native import library, native_table
from ds_ext.ops.executors.triton import devices, kernel_table
from tests.common import needs
from tests.common.spies import noted

# Where kernels run: on a GPU if there is one, else in Triton's interpreter on the CPU.
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
HOST = torch.device("cpu")
EACH = ["ops", "native", pytest.param("kernels", marks=needs.triton)]


def use(monkeypatch: pytest.MonkeyPatch, path: str, is_default: bool = True) -> None:
    """Makes "native", "kernels" or "ops" step the tensors of optimizers made from now on.

    Native code steps tensors of the CPU; kernels, and the ops that they are compared with, those of
    ``DEVICE``. It becomes torch's default device until the test ends, unless not ``is_default``.
    """
    is_native = path == "native"
    assert not is_native or library.load() is not None, "no C++ compiler"
    monkeypatch.setattr(devices, "DEVICES", {DEVICE.type} if path == "kernels" else set())
    monkeypatch.setattr(native_table, "is_available", lambda: is_native)
    unbatched.forget_tables()  # batches whose tables another path has made
    if is_default and DEVICE != HOST:
        torch.set_default_device(HOST if is_native else DEVICE)


def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes that native code and kernels make from now on."""
    names: list[str] = []

    for table in (native_table.NativeTable, kernel_table.KernelTable):
        noted(monkeypatch, table, "run", lambda self, call, *_: names.append(call.name))
    return names


def fast_bf16_products(monkeypatch: pytest.MonkeyPatch, most: int = 6) -> list[torch.dtype]:
    """Makes matrix products those of a GPU with fast bf16 products: see ``products.most_products``.

    Returns the dtypes of their operands, which are added as products are made.
    """
    dtypes: list[torch.dtype] = []

    def patch(name: str) -> None:
        multiply = getattr(torch, name)

        def multiplied(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
            dtypes.extend((a.dtype, b.dtype))
            return multiply(a.to(out_dtype), b.to(out_dtype))

        monkeypatch.setattr(torch, name, multiplied)

    patch("mm")
    patch("bmm")
    monkeypatch.setattr(products, "most_products", lambda device: most)
    return dtypes


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """torch's operations and native passes have so many threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
