"""The error for torch operations on what only passes read: gradients and weights of rules."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "getitem", "setitem"),
)


class ReadByPasses:
    """A base class of runs that are no tensors: torch's operations raise an error that says so."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raises TypeError. Torch calls it for its functions and for methods of tensors."""
        raise TypeError(_message(getattr(function, "__name__", str(function))))

    if not TYPE_CHECKING:  # else a type checker believes that it has every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError. Python calls it for attributes that do not exist."""
            if name.startswith("__") or not hasattr(Tensor, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(_message(name))


def _message(operation: str) -> str:
    return (
        f"Torch's {operation} cannot read it: p and g of a rule, and in a batch its state too, are "
        "no tensors, because a pass scales, unscales and rounds them block by block. Use functions "
        'of ds_ext.ops, such as ops.lerp_(s["m"], g, weight, shard), or write an expression with '
        "ops.read(g, b) in its method block: docs/adding-an-optimizer.md."
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(*_: Any) -> NoReturn:
        raise TypeError(_message(name))

    return operator


for _name in _OPERATORS:
    setattr(ReadByPasses, f"__{_name}__", _refused(f"__{_name}__"))
