"""Finds what a function changes besides its result: a module's attributes and buffers, arguments.

Parameters are not compared, because ZeRO-3 gathers them while a module runs.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

# Attributes of every module, such as its hooks, and those that DeepSpeed's hooks assign.
_OF_HOOKS = {"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_external_params"}
_SKIPPED = vars(nn.Module()).keys() | _OF_HOOKS
_NUMBERS = (int, float, complex, str, bytes)

Noted: TypeAlias = list[tuple[Any, int]]  # the values in containers, and the versions of tensors
Kept: TypeAlias = dict[tuple[str, str], Noted]  # by the names of a submodule and of its attribute


def kept_by(module: nn.Module) -> Kept:
    """Returns the attributes and buffers of a module and its submodules."""
    return {
        (part, name): noted(value)
        for part, each in module.named_modules()
        for name, value in (*vars(each).items(), *each._buffers.items())
        if name not in _SKIPPED and not name.startswith("ds_")
    }


def noted(value: Any) -> Noted:
    """Returns a value, or all values in nested containers, as they are now."""
    return [
        (x, x._version if isinstance(x, Tensor) and not x.is_inference() else 0)
        for x in _leaves(value)
    ]


def is_same(before: Noted, after: Noted) -> bool:
    """Returns whether nothing has been assigned or written in place, except an equal number."""
    return len(before) == len(after) and all(map(_is_same, before, after))


def changed(before: Kept, after: Kept, but_caches: bool = False) -> str | None:
    """Returns the name of an attribute or buffer that has changed; None if there is none.

    Args:
        before: what a module kept.
        after: what it keeps now.
        but_caches: skips values that may be caches, made or enlarged: no tensor among them requires
            a gradient, or has the shape of the one before.
    """
    for (part, name), now in after.items():
        was = before.get((part, name), [])
        if not is_same(was, now) and not (but_caches and _may_be_cache(was, now)):
            return f"{part}.{name}".lstrip(".")
    gone = before.keys() - after.keys()
    return ".".join(min(gone)).lstrip(".") if gone else None


def _leaves(value: Any) -> Iterator[Any]:
    """The values and keys in nested containers."""
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple, deque)):
        for x in value:
            yield from _leaves(x)
    else:
        yield value


def _may_be_cache(before: Noted, after: Noted) -> bool:
    shapes = [x.shape for x, _ in before if isinstance(x, Tensor)]
    tensors = [x for x, _ in after if isinstance(x, Tensor)]
    return not any(x.requires_grad or x.shape in shapes for x in tensors)


def _is_same(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    (was, written), (now, rewritten) = before, after
    is_equal = type(was) is type(now) and isinstance(was, _NUMBERS) and was == now
    return (was is now and written == rewritten) or is_equal
