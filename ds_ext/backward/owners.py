"""Who steps a model: the one made last, and nobody's copies.

Two sets of hooks on one parameter would each take its gradient. So whoever begins to step a model
takes it over from who does so far, as a new engine does with DeepSpeed's own optimizers. Hooks on
modules are ``Hook`` objects, which copies and files of a module do not contain.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ext.backward.settings import Gradients
from ds_ext.distributed import consensus
from ds_ext.distributed.placement import Group
from ds_ext.logs import logger
from ds_ext.optimizer import RuleOptimizer

if TYPE_CHECKING:
    from ds_ext.backward.reentrant import Uses


class Hook:
    """A module's hook that calls ``call``; in a copy of the module, or a file, it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """Calls ``call``."""
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes any arguments and returns None; a file with it is read without ds_ext.
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_hook(hook: object) -> bool:
    """Whether a module's hook is a ``Hook``, or what a copy has in its place."""
    return isinstance(hook, Hook) or isinstance(
        getattr(hook, "__self__", None), contextlib.nullcontext
    )


class Owner(Protocol):
    """Who steps parameters from hooks."""

    optimizer: RuleOptimizer
    how: Gradients

    @property
    def uses(self) -> "Uses":
        """Of its model, since the last backward pass."""

    def leaf(self, param: Tensor) -> Tensor:
        """What stands for a parameter in the graph of a loss: itself, if not gathered there."""

    def repeated(self, loss: Tensor) -> contextlib.AbstractContextManager[None]:
        """A backward pass of ``loss`` runs within that is run once more afterwards."""

    def unfinished(self) -> str:
        """What would be lost of the step in progress if it ended now; empty if nothing."""

    def discard(self, params: Collection[Tensor]) -> None:
        """Drops what has come of the gradients of ``params`` since the last step."""

    def clipped_norm(self, params: Collection[Tensor], asked: Mapping[str, Any]) -> Tensor | None:
        """The norm of all gradients, if they are clipped as torch is asked to; else None."""

    def give_way(self) -> None:
        """Takes the hooks off, for another owner of the same parameters."""


_owners: Any = WeakTensorKeyDictionary()  # parameter: weak reference to its Owner
_live: "weakref.WeakSet[Owner]" = weakref.WeakSet()
_lock = threading.Lock()  # for _live: a set that grows cannot be iterated over


def live() -> list[Owner]:
    """All who step parameters, in any thread."""
    with _lock:
        return list(_live)


def owner(param: Tensor) -> Owner | None:
    """Who steps ``param``."""
    found = _owners.get(param)
    return None if found is None else found()


def claim(param: Tensor, by: Owner, name: str) -> None:
    """Makes ``by`` the owner of ``param``. Raises RuntimeError if it has another one."""
    other = owner(param)
    if other is not None and other is not by:
        raise RuntimeError(
            f"{name} is stepped by two engines, or calls of fuse_into_backward: freeze it in one "
            "of their models, or end one of them (engine.destroy(), or .remove() of what "
            "fuse_into_backward returned)."
        )
    _owners[param] = weakref.ref(by)
    with _lock:
        _live.add(by)


def release(params: Iterable[Tensor], by: Owner) -> None:
    """Leaves those of ``params`` without an owner that are ``by``'s."""
    with _lock:
        _live.discard(by)
    for param in params:
        if owner(param) is by:
            del _owners[param]


def check_finished(params: Iterable[Tensor], group: Group = None) -> list[Owner]:
    """Finds who steps ``params`` so far; all ranks of ``group`` call it.

    Raises RuntimeError on all of them if, on one, an owner is in the middle of a step.
    """
    olders = list(dict.fromkeys(filter(None, map(owner, params))))
    unfinished = [lost for older in olders if (lost := older.unfinished())]
    told = [lost for lines in consensus.gathered(unfinished, group) for lost in lines]
    if told:
        raise RuntimeError(
            "this model is in the middle of a step of another engine, or call of "
            f"fuse_into_backward, which has {told[0]}: end that step, or discard it by "
            "zero_grad(), by engine.destroy(), or by .remove() of what fuse_into_backward returned."
        )
    return olders


def take_over(params: Iterable[Tensor], group: Group = None) -> None:
    """Ends whoever steps one of ``params`` so far, and says so.

    All ranks of ``group`` call it. Raises RuntimeError as ``check_finished``, before it changes
    anything.
    """
    olders = check_finished(params, group)
    for older in olders:
        older.give_way()
    if olders and consensus.is_first():
        logger.warning(
            "this model was stepped by another engine, or call of fuse_into_backward, which was "
            "not destroyed: the new one takes over, and the older one cannot be used any more."
        )


def others_reached(by: Owner) -> bool:
    """Whether the backward pass in progress reaches parameters that others than ``by`` step."""
    return any(
        torch._C._will_engine_execute_node(get_gradient_edge(other.leaf(param)).node)
        for other in live()
        if other is not by
        for param in other.optimizer.group_of
        if param.requires_grad and owner(param) is other
    )


def is_stepped(leaves: Iterable[Tensor]) -> bool:
    """Whether one of the leaves of a graph stands for a parameter that is stepped from hooks."""
    stepped = {
        id(by.leaf(param)) for by in live() for param in by.optimizer.group_of if owner(param) is by
    }
    return any(id(leaf) in stepped for leaf in leaves)


def others_used(by: Owner) -> list[Owner]:
    """Others whose models were called since their last backward pass, by the thread of ``by``.

    Forward passes run in the thread that calls them, on any device: those of other threads are for
    other losses.
    """
    return [
        other
        for other in live()
        if other is not by and other.uses.used_at and other.uses.thread == by.uses.thread
    ]


def others_hidden(by: Owner) -> bool:
    """Whether the backward pass in progress may reach others' parameters in checkpointed segments.

    A segment's own backward pass does not tell what the whole one reaches, nor the reverse.
    """
    own = by.uses
    others = [o.uses for o in others_used(by) if o.uses.used_at > own.made_at]
    return any(own.in_segment or uses.in_segment for uses in others)
