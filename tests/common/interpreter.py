"""Triton's interpreter, by which kernels run on a machine without a GPU."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter

try:
    from triton.language.semantic import TritonSemantic
except ImportError:  # before Triton 3.5
    TritonSemantic = None


def quicken() -> None:
    """Lets the interpreter do once in a process what it does again and again: the same results.

    It puts its functions into Triton's language at each launch and at each call of a function
    within a kernel, which took two thirds of a test's time, makes a table of types to look up one
    of them, and makes the type of each tensor anew.
    """
    modules = {"language": language, "core": core}
    if TritonSemantic is not None:
        interpreter._patch_attr = _put_builtin
        _leave_out_unread_checks()
        _keep_types()
    interpreter._patch_lang(SimpleNamespace(__globals__=modules))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
    dtype_of = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda a_type: (
        np.dtype(np.uint64) if a_type.scalar.is_ptr() else dtype_of(a_type.scalar)
    )


def _put_builtin(place, name, member, builder, scope):
    """Puts a function of Triton's language in its place, without a check and a copy per call."""
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(place, name, call)


def _leave_out_unread_checks():
    """Sums of integers are computed once more, in int64, for an assertion of debugging only."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_types():
    """Makes the type of a block, and what a tensor says of its shape, once."""
    make, make_block = core.tensor.__init__, core.block_type.with_element_ty

    def init(self, handle, its_type):
        kept = vars(its_type).get("kept_shape")
        if kept is None:
            make(self, handle, its_type)
            its_type.kept_shape = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, its_type, its_type.scalar
            self.shape, self.numel = kept

    def with_element_ty(self, element):
        kept = vars(self).setdefault("kept_types", {})
        if element.is_ptr():  # which has no hash
            return make_block(self, element)
        if element not in kept:
            kept[element] = make_block(self, element)
        return kept[element]

    unwrap = core._unwrap_if_constexpr
    core._unwrap_if_constexpr = lambda x: x if type(x) is int else unwrap(x)
    core.tensor.__init__ = init
    core.block_type.with_element_ty = with_element_ty
    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    TritonSemantic.computation_type_impl = functools.cache(TritonSemantic.computation_type_impl)
