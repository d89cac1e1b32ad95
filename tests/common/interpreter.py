"""Triton's interpreter, by which kernels run on a machine without a GPU."""

import functools
from types import SimpleNamespace

import numpy as np
from triton import language
from triton.runtime import interpreter


def quicken() -> None:
    """Lets the interpreter do once in a process what it does again and again: the same results.

    It puts its functions into Triton's language at each launch and at each call of a function
    within a kernel, which took two thirds of a test's time, and makes a table of types to look up
    one of them.
    """
    modules = {"language": language, "core": language.core}
    interpreter._patch_lang(SimpleNamespace(__globals__=modules))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
    dtype_of = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda a_type: (
        np.dtype(np.uint64) if a_type.scalar.is_ptr() else dtype_of(a_type.scalar)
    )
