"""Products of bf16 matrices with fp32 sums, on CPUs with AVX-512 BF16."""

import ctypes
import functools

import torch
from torch import Tensor

from ds_ext.logs import logger
from ds_ext.ops.executors.native import library

_Sizes = ctypes.c_int64 * 13


@functools.cache
def is_available() -> bool:
    """Returns whether this processor has the instructions; may build the library."""
    found = library.load()
    if found is not None and found.products_available():
        return True
    logger.info("no native products with AVX-512 BF16: matrix products are made of fp32 numbers")
    return False


def product_(
    out: Tensor, a: Tensor, b: Tensor, beta: Tensor | float, symmetric: bool = False
) -> None:
    """out ← beta · out + a · b, for one matrix or for a stack: a first dimension of equal size.

    Args:
        out: [m, n] in fp32, with consecutive columns.
        a: [m, k] in bf16.
        b: [k, n] likewise.
        beta: the factor of ``out``, which is not read if it is 0; a tensor in fp32 has one number,
            or one for each matrix.
        symmetric: whether the result is symmetric; only one half of it is then computed.
    """
    found = library.load()
    assert (
        found is not None
        and out.dtype == torch.float32
        and (out.stride(-1) == 1 or out.shape[-1] == 1)
    )
    sizes = _Sizes(
        *(*a.shape[-2:], b.shape[-1], *a.stride()[-2:], *b.stride()[-2:], out.stride(-2)),
        *(len(out) if out.dim() == 3 else 1, a.stride(0), b.stride(0), out.stride(0)),
        isinstance(beta, Tensor) and beta.dim() == 1,
    )
    factor = ctypes.c_float(beta) if not isinstance(beta, Tensor) else beta.contiguous()
    at = factor.data_ptr() if isinstance(factor, Tensor) else ctypes.addressof(factor)
    pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
    found.products_run(*pointers, sizes, at, symmetric, torch.get_num_threads())


def apply_(call: ctypes.Array[ctypes.c_int], entry: int, a: Tensor, b: Tensor, first: int) -> None:
    """Makes the pass APPLY over one run of a matrix, by the update a · b.

    Args:
        call: of the pass, with the form of a run in fp32.
        entry: the address of the run's row of the table; its column ``x`` is not read.
        a: [rows touched, k] in bf16.
        b: [k, cols] likewise.
        first: the row of the matrix at which ``a`` starts.
    """
    found = library.load()
    assert found is not None, "there are no native passes"
    sizes = _Sizes(a.shape[1], first, *a.stride(), *b.stride())
    found.products_apply(call, entry, a.data_ptr(), b.data_ptr(), sizes, torch.get_num_threads())
