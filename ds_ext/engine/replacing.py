"""Methods of DeepSpeed that are replaced when it is imported: who notes which, in what order."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Method: TypeAlias = Callable[..., Any]


class Patch(NamedTuple):
    """A method of DeepSpeed's and what takes its place, given the original as first argument."""

    owner: type
    name: str
    function: Method

    def apply(self) -> None:
        """Puts the function in the method's place."""
        original, function = getattr(self.owner, self.name), self.function

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(self.owner, self.name, method)


PATCHES: list[Patch] = []  # in the order in which they are applied


def replaces(owner: type, *names: str) -> Callable[[Method], Method]:
    """Returns a decorator that notes a function in ``PATCHES``, by which ``register`` replaces.

    The function is called as ``function(original, self, ...)``.

    Args:
        owner: the class.
        names: its methods; by default, the one that is called as the function.
    """

    def note(function: Method) -> Method:
        PATCHES.extend(Patch(owner, name, function) for name in names or (function.__name__,))
        return function

    return note
