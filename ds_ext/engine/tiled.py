"""Supports DeepSpeed's tiled functions, which run backward for one tile of the sequence at a time.

Each tile adds a part of a weight's gradient. ds_ext uses the gradient after the last tile.
``TiledFusedLogitsLoss`` computes gradients in forward. ds_ext holds them until backward, and then
multiplies them by the gradient of the loss. DeepSpeed multiplies only the input's gradient.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
)
from torch import Tensor, nn

from ds_ext.backward import foreign_grads, owners
from ds_ext.backward.fused_backward import FusedBackward


class DeferredGradient(NamedTuple):
    """A weight's gradient, before multiplication by the gradient of the loss."""

    owner: FusedBackward
    param: Tensor
    grad: Tensor
    is_called: bool  # whether the loss calls the weight's module


def register() -> None:
    """Makes DeepSpeed's functions step weights of ds_ext. Without such weights they do not change.

    DeepSpeed tells no hook of a weight which of its tiles is the last.
    """
    for function in (SequenceTiledCompute, TiledMLP):
        _choose(function, _defer_until_last_tile(function))
    _choose(TiledFusedLogitsLoss, _defer_to_backward(TiledFusedLogitsLoss))


def _choose(function: Any, methods: dict[str, Any]) -> None:
    """Makes calls of a function that use weights of ds_ext run other methods."""
    original = function.apply
    methods["apply"] = classmethod(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
    own: Any = type(function.__name__, (function,), methods)

    def apply(*args: Any) -> Any:
        return (own.apply if _owners(args) else original)(*args)

    function.apply = staticmethod(apply)


def _defer_until_last_tile(function: Any) -> dict[str, Any]:
    """Methods of a function that recomputes forward in backward."""
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def counted(ctx: Any, *args: Any) -> Any:
        ctx.owners = _owners(args)
        with _counted_once(ctx.owners):
            return forward(ctx, *args)

    @functools.wraps(backward)
    def whole(ctx: Any, *grads: Any) -> Any:
        _refuse_create_graph(function)
        with _set_aside(ctx.owners) as left:
            result = backward(ctx, *grads)
        for param, owner in left:
            owner.buckets.take(param)
        return result

    return {"forward": staticmethod(counted), "backward": staticmethod(whole)}


def _defer_to_backward(function: Any) -> dict[str, Any]:
    """Methods of a loss that runs backward in forward."""
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def kept(ctx: Any, *args: Any) -> Any:
        ctx.owners = _owners(args)
        with _counted_once(ctx.owners) as called, _set_aside(ctx.owners) as left:
            loss = forward(ctx, *args)
        ctx.waiting = []
        for param, owner in left:
            grad, param.grad = param.grad, None
            assert grad is not None
            ctx.waiting.append(DeferredGradient(owner, param, grad, param in called))
        return loss

    @functools.wraps(backward)
    def joined(ctx: Any, *grads: Any) -> Any:
        _refuse_create_graph(function)
        if ctx.waiting is None:
            raise RuntimeError(f"the graph of a {function.__name__} was run backward once more.")
        (factor,) = grads
        measured = foreign_grads.measured()
        is_last = measured is None
        for owner, param, grad, is_called in ctx.waiting:
            if not is_last and owner is not measured:
                continue
            grad = grad.mul_(factor) if is_last else grad * factor
            owner.buckets.join(param, grad)
            if is_called and owner.buckets.uses.count[param] == 1:  # no other call contributes
                owner.buckets.take(param)
        if is_last:
            ctx.waiting = None
        # The original would multiply its saved gradient in place.
        found = backward(ctx, torch.ones_like(factor))
        return tuple(None if g is None else g * factor for g in found)

    return {"forward": staticmethod(kept), "backward": staticmethod(joined)}


def _refuse_create_graph(function: Any) -> None:
    """Raises RuntimeError in a backward pass whose gradients are to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function.__name__}: its gradients cannot be differentiated, as a gradient penalty "
            "does (create_graph=True). Compute the penalty with layers or losses that are not "
            "tiled."
        )


def _owners(args: Iterable[Any]) -> list[FusedBackward]:
    """The owners of all weights in a function's arguments, in modules and in lists."""
    params: list[Tensor] = []
    for arg in args:
        if isinstance(arg, nn.Module):
            params += arg.parameters()
        elif isinstance(arg, (list, tuple)):
            params += [x for x in arg if isinstance(x, Tensor)]
    found = dict.fromkeys(map(owners.owner, params))
    return [owner for owner in found if isinstance(owner, FusedBackward)]


@contextmanager
def _set_aside(found: list[FusedBackward]) -> Iterator[list[tuple[Tensor, FusedBackward]]]:
    """Context that leaves gradients in ``.grad``. At exit, lists parameters that have gradients."""
    left: list[tuple[Tensor, FusedBackward]] = []
    with ExitStack() as stack:
        aside = [(owner, stack.enter_context(owner.buckets.set_aside())) for owner in found]
        yield left
    left += [(param, owner) for owner, params in aside for param in params]


@contextmanager
def _counted_once(found: list[FusedBackward]) -> Iterator[set[Tensor]]:
    """Context that counts a module's calls as one. At exit, lists parameters of called modules."""
    called: set[Tensor] = set()
    counts = [(owner.buckets.uses.count, owner.buckets.uses.count.copy()) for owner in found]
    yield called
    for count, before in counts:
        more = [param for param in count if count[param] > before[param]]
        count.update({param: before[param] + 1 - count[param] for param in more})
        called.update(more)
