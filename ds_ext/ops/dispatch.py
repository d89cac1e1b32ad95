"""Which executor makes a pass: the first that supports it.

``executors`` registers them when ``ds_ext.ops`` is imported. Passes are values of ``ops.passes``.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])


class Executor(Protocol):
    """Makes passes over the runs of one parameter, or of a batch of them."""

    def run(self, asked: Any, where: Any) -> Any:
        """Makes a pass and returns its results.

        Args:
            asked: the pass, a value of ``ops.passes``.
            where: the geometry, a ``Shard`` or a ``Batch``.

        Returns:
            The results, or NotImplemented if the executor does not support the pass. Then it has
            read and written nothing.
        """
        ...


class Makers(dict[type, Callable[..., Any]]):
    """The functions of an executor, by the passes that they make.

    Each takes the fields of its pass, and the geometry after them if the pass has one.
    """

    def makes(self, kind: type) -> Callable[[Made], Made]:
        """Registers the decorated function for a pass."""

        def register(make: Made) -> Made:
            self[kind] = make
            return make

        return register


_executors: list[Executor] = []


def register(executor: Executor) -> None:
    """Adds an executor, which is asked after those that were added before."""
    _executors.append(executor)


def run(asked: Any, where: Any) -> Any:
    """Makes a pass by the first executor that supports it, and returns its results.

    Raises:
        TypeError: ``where`` is neither a ``Shard`` nor a batch that has tables.
    """
    for executor in _executors:
        made = executor.run(asked, where)
        if made is not NotImplemented:
            return made
    raise TypeError(f"no executor makes {type(asked).__name__} over a {type(where).__name__}")
