"""Keeps the norm prepass from changing gradients that it does not measure.

These are gradients of other leaves (a head with its own optimizer, inputs, the parameters of
another engine) and of tensors with ``retain_grad()``.

The pass in progress is identified by autograd's graph task id, which is right in any thread. On a
CPU, hooks run in the thread that called backward. On a GPU, they run in a thread of the device,
where passes of several user threads take turns, so a thread-local variable would mix them up.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ds_ext.backward.norm_prepass import nodes
from ds_ext.backward.owners import GradientOwner


class SavedGrad(NamedTuple):
    """The ``grad`` of a tensor before the pass, and a copy of it if the pass adds in place."""

    tensor: TensorWeakRef
    grad: Tensor | None
    copy: Tensor | None = None

    def restore(self) -> None:
        """Restores the ``grad`` of the tensor, if it still exists."""
        if (x := self.tensor()) is not None:
            x.grad = self.grad
            if self.grad is not None and self.copy is not None:
                self.grad.copy_(self.copy)


class MeasuringPass(NamedTuple):
    """A norm prepass, with the backward passes that run inside it."""

    by: GradientOwner  # of the measured gradients
    saved: list[SavedGrad]


_passes: dict[int, MeasuringPass] = {}  # in progress, by graph task id
_retaining: Any = WeakTensorKeyDictionary()  # tensors with retain_grad(): None
_lock = threading.Lock()


def measured() -> GradientOwner | None:
    """Returns the owner of the gradients that the backward pass in progress only measures.

    None if the pass does not measure. Call it in a hook, or in the backward of a function.
    """
    found = _passes.get(torch._C._current_graph_task_id())
    return None if found is None else found.by


@contextlib.contextmanager
def preserved(by: GradientOwner, loss: Tensor) -> Iterator[None]:
    """A context for a backward pass of ``loss`` that measures the gradients of ``by``.

    Other parameters get no gradient, and their hooks are not called. The context
    restores the ``grad`` of other tensors at its end. It cannot restore them earlier, because a
    checkpointed segment reads the ``grad`` of its inputs.
    """
    this = MeasuringPass(by, [])
    try:
        with _part(this, [loss], is_inner=False):
            yield
    finally:
        with torch.no_grad():
            for each in reversed(this.saved):
                each.restore()


@contextlib.contextmanager
def _part(this: MeasuringPass, roots: Sequence[Tensor], is_inner: bool) -> Iterator[None]:
    """A context for one of the passes of ``this``, from ``roots``.

    In a checkpointed segment, the ``grad`` of a leaf may be a view of a larger tensor: its values
    are restored, and the tensor is not replaced.
    """
    graph = {node for root in roots for node in nodes(root)}
    numbers: list[int] = []

    def begin(_: object) -> None:
        numbers.append(torch._C._current_graph_task_id())
        _passes[numbers[-1]] = this

    own = this.by.layout.own_leaves({*this.by.optimizer.group_of})
    this.saved[:] = [each for each in this.saved if each.tensor() is not None]
    leaves = [(node, x) for node in graph if (x := getattr(node, "variable", None)) is not None]
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: [_passes.pop(number, None) for number in numbers])
        for root in roots:
            if root.grad_fn is not None:
                undo.callback(root.grad_fn.register_prehook(begin).remove)
        for node, leaf in leaves:
            if isinstance(leaf, nn.Parameter) and leaf not in own:
                undo.callback(node.register_prehook(_nothing).remove)
                undo.callback(_guard(leaf))
            elif leaf not in own:
                copy = leaf.grad.clone() if is_inner and leaf.grad is not None else None
                this.saved.append(SavedGrad(TensorWeakRef(leaf), leaf.grad, copy))
                if not is_inner:
                    leaf.grad = None  # or torch would add to it in place
        with _lock:
            retaining = [x for x in _retaining if x.grad_fn in graph]
        this.saved.extend(SavedGrad(TensorWeakRef(x), x.grad) for x in retaining)
        yield


def _nothing(grads: tuple[Tensor, ...]) -> tuple[None] | None:
    """A hook before a leaf's node: replaces its gradient by None in a norm prepass."""
    return None if measured() is None else (None,)


def _guard(leaf: Tensor) -> Callable[[], None]:
    """Disables a leaf's post-accumulate hooks in norm prepasses; returns a function to undo it."""
    hooks: dict[int, Callable[[Tensor], None]] = leaf._post_accumulate_grad_hooks or {}
    before = dict(hooks)

    def guarded(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        return lambda param: None if measured() is not None else hook(param)

    def undo() -> None:
        hooks.update({key: hook for key, hook in before.items() if key in hooks})

    hooks.update({key: guarded(hook) for key, hook in before.items()})
    return undo


def recording(retain_grad: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Returns ``Tensor.retain_grad``, which also records the tensor."""

    @functools.wraps(retain_grad)
    def call(self: Tensor) -> None:
        retain_grad(self)
        if not self.is_leaf:
            with _lock:
                _retaining[self] = None

    return call


def preserving(backward: Callable[..., None]) -> Callable[..., None]:
    """Returns ``autograd.backward``, which preserves gradients if a norm prepass runs it.

    A segment of reentrant checkpointing has its own graph and backward pass.
    """

    @functools.wraps(backward)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> None:
        outer = _passes.get(torch._C._current_graph_task_id())
        if outer is None:
            return backward(tensors, *args, **kwargs)
        given = [tensors] if isinstance(tensors, Tensor) else tensors
        with _part(outer, [x for x in given if isinstance(x, Tensor)], is_inner=True):
            return backward(tensors, *args, **kwargs)

    return call
