"""Registers functions that replace methods of DeepSpeed, and applies them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Method: TypeAlias = Callable[..., Any]


class Patch(NamedTuple):
    """A method of DeepSpeed, and the function that replaces it.

    The function receives the original method as its first argument.
    """

    owner: type
    name: str
    function: Method

    def bound(self) -> Method:
        """Returns the method that calls the function; AttributeError if DeepSpeed lacks it."""
        original, function = getattr(self.owner, self.name), self.function

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return method


PATCHES: list[Patch] = []  # in the order of application


def replaces(owner: type, *names: str) -> Callable[[Method], Method]:
    """Returns a decorator that adds a function to ``PATCHES``.

    ``patches.register`` applies them. The patch calls ``function(original, self, ...)``.

    Args:
        owner: the class to patch.
        names: the methods to replace; by default the method named like the function.
    """

    def note(function: Method) -> Method:
        PATCHES.extend(Patch(owner, name, function) for name in names or (function.__name__,))
        return function

    return note
