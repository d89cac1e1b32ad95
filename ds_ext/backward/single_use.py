"""Finds graphs that can run backward only once, so that no norm prepass begins on them.

Selective checkpointing frees each kept tensor when backward reads it, whatever ``retain_graph``
says. TRL's activation offloading deletes what it unpacks. Of other hooks of saved tensors, only
torch's own are known to be repeatable. A compiled backward pass overwrites the buffers that its
forward pass donates, unless it is compiled inside a pass that keeps its graph.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch._functorch.config
from torch import Tensor
from torch.autograd.graph import Node

from ds_ext.backward import int8_weights
from ds_ext.backward.norm_prepass import nodes

CHECKPOINT = "torch.utils.checkpoint"
# It forgets its inputs in the first backward pass.
FORGETFUL = "deepspeed.runtime.activation_checkpointing.checkpointing"


def single_use(loss: Tensor) -> str | None:
    """Returns what allows one backward pass only in the graph of ``loss``; None if nothing does."""
    seen: set[int] = set()  # ids of hooks, which the graph keeps alive
    for node in nodes(loss):
        function = getattr(node, "_forward_cls", None)  # if it is written in Python
        if getattr(function, "__module__", "") == FORGETFUL:
            return "deepspeed.checkpointing"
        if _donates(function):
            return "torch.compile, unless torch._functorch.config.donated_buffer was False,"
        for hook in _unpack_hooks(_saved(node)):
            if id(hook) not in seen:
                seen.add(id(hook))
                if found := _single_use(hook):
                    return found
    return None


def _donates(function: Any) -> bool:
    """Whether a function's backward is compiled already, and overwrites buffers; as torch tests."""
    may_donate: bool = getattr(torch._functorch.config, "donated_buffer", False)
    is_compiled = getattr(function, "compiled_bw", None) is not None
    return may_donate and is_compiled and function.metadata.bw_donated_idxs != []


def _single_use(hook: Callable[..., Any]) -> str | None:
    """The same for a hook that unpacks saved tensors."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    if module != CHECKPOINT:
        return None if module.startswith("torch.") else f"saved_tensors_hooks of {module}"
    frame = _variable(hook, "frame")
    context = _variable(frame.recompute_fn, "recompute_context")
    if not isinstance(context, contextlib.nullcontext):
        return "checkpointing with a context_fn, such as selective checkpointing,"
    outer = _unpack_hooks(getattr(frame, "saved_args", ()))  # of the segment's inputs
    return next(filter(None, map(_single_use, outer)), None)


def _saved(node: Node) -> Iterator[Any]:
    """Yields the saved tensors of a node, without unpacking them."""
    for name in _names(type(node)):
        try:
            found = getattr(node, name)
        except RuntimeError:  # freed
            continue
        yield from found if isinstance(found, (list, tuple)) else [found]


_names_of: WeakKeyDictionary[type[Node], list[str]] = WeakKeyDictionary()


def _names(kind: type[Node]) -> list[str]:
    """The attributes of a kind of node. DeepSpeed makes kinds per module, so none is kept alive."""
    if kind not in _names_of:
        _names_of[kind] = [name for name in dir(kind) if name.startswith("_raw_saved")]
    return _names_of[kind]


def _unpack_hooks(saved: Any) -> Iterator[Callable[..., Any]]:
    for x in saved:
        hook = getattr(x, "unpack_hook", None)
        if hook is not None and hook.__module__ == int8_weights.__name__:
            if (node := getattr(x.data, "grad_fn", None)) is not None:  # by the hooks around ours
                yield from _unpack_hooks(_saved(node))
        elif hook is not None:
            yield hook


def _variable(function: Any, name: str) -> Any:
    """A variable of the enclosing function; None if ``function`` does not refer to it."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None
