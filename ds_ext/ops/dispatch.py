"""Dispatches each pass, a value of ``ops.passes``, to the first executor that supports it.

Importing ``ds_ext.ops`` registers the executors.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])


class Executor(Protocol):
    """Makes passes over the run of one parameter, or over the runs of a batch."""

    def run(self, asked: Any, where: Any) -> Any:
        """Makes a pass and returns its results.

        Args:
            asked: the pass, a value of ``ops.passes``.
            where: the geometry, a ``Shard`` or a ``Batch``.

        Returns:
            The results, or NotImplemented if the executor does not support the pass. In that case
            it has read and written nothing.
        """
        ...


class Makers(dict[type, Callable[..., Any]]):
    """The functions of an executor by the type of their pass.

    A function takes the fields of its pass, then the geometry if the pass has one.
    """

    def makes(self, kind: type) -> Callable[[Made], Made]:
        """Registers the decorated function for a pass."""

        def register(make: Made) -> Made:
            self[kind] = make
            return make

        return register


_executors: dict[type, tuple[Executor, ...]] = {}


def register(where: type, *executors: Executor) -> None:
    """Registers the executors of passes over a kind of geometry, in order of preference."""
    _executors[where] = executors


def execute(asked: Any, where: Any) -> Any:
    """Makes a pass by the first executor that supports it, and returns its results.

    Raises:
        TypeError: no executor supports it: for a batch, no table reads one of its inputs.
    """
    for executor in _executors.get(type(where), ()):
        made = executor.run(asked, where)
        if made is not NotImplemented:
            return made
    raise TypeError(
        f"the pass {type(asked).__name__} cannot read its input over a batch: native code and "
        "kernels have no form for this expression, or read tensors of other dtypes. Register the "
        "rule with is_batched=False, and its parameters are stepped one by one."
    )
