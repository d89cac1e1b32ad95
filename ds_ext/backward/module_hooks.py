"""Hooks of modules. Copies and pickles of a module do not contain them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo


class Hook:
    """A module's hook that calls ``call``; in a copy or pickle of the module it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @_disable_dynamo
    def __call__(self, *args: Any) -> Any:
        """Calls ``call``. Dynamo breaks its graph here: hooks read what it cannot trace."""
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that takes any arguments and returns None, and is unpickled without ds_ext.
        return getattr, (contextlib.nullcontext(), "__exit__")


def check_leaf_inputs(leaf: nn.Module, inputs: tuple[object, ...]) -> None:
    """Checks that the backward hook of a ZeRO-3 leaf module will find its parameters' gradients.

    Torch calls that hook after the gradients of the module's positional inputs are computed. If no
    input needs a gradient, it calls the hook before the parameters have gradients.

    Raises:
        RuntimeError: no positional input needs a gradient, and a parameter does.
    """
    is_seen = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if is_seen or not torch.is_grad_enabled():
        return
    if any(p.requires_grad for p in leaf.parameters()):
        raise RuntimeError(
            f"{type(leaf).__name__} is a leaf module of ZeRO-3 (set_z3_leaf_modules), but no "
            "positional argument of its forward requires a gradient, so its parameters would not "
            "be trained. Pass a tensor that requires a gradient by position (for a Hugging Face "
            "model call model.enable_input_require_grads()), call the module under "
            "torch.no_grad(), or unset it with deepspeed.utils.unset_z3_leaf_modules."
        )
