"""Hooks of modules that copies and pickles of a module do not contain."""

import contextlib
from collections.abc import Callable
from typing import Any


class Hook:
    """A module's hook that calls ``call``; in a copy or pickle of the module it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """Calls ``call``."""
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that takes any arguments and returns None, and is unpickled without ds_ext.
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_hook(hook: object) -> bool:
    """Returns whether a module's hook is a ``Hook``, or the function that a copy has instead."""
    return isinstance(hook, Hook) or isinstance(
        getattr(hook, "__self__", None), contextlib.nullcontext
    )
