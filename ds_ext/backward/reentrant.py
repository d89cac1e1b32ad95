"""Which parameters get their gradient in parts, and are not done when a hook of theirs fires.

Weights used again under reentrant checkpointing: its segments run forward without gradients, and
each has a backward pass of its own, in which the hook of every parameter of the segment fires. And
weights of modules that are taken together (ZeRO-3's leaf modules, FSDP2's units) and are called
again.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ds_ext.backward.owners import Hook

_clock = itertools.count(1)


class Uses:
    """Counts how often modules were called for the backward pass to come.

    A call without gradients counts if it is made by one with gradients, which is how a
    checkpointed segment runs; generation between steps is not, nor what is called while
    ``brings_gradients`` says that its backward pass brings none.
    """

    def __init__(
        self,
        module: nn.Module,
        together: Mapping[nn.Module, list[Tensor]],
        brings_gradients: Callable[[], bool] = lambda: True,
    ) -> None:
        self.brings_gradients = brings_gradients
        self.is_counting = True
        self.count: Counter[Tensor] = Counter()
        self.in_segment: set[Tensor] = set()  # used in a segment that is run again in backward
        self.made_at = next(_clock)
        self.used_at = 0  # when a call was counted last; 0: none is
        self.thread = threading.get_ident()  # of the last call that was counted
        self.is_stale = False  # whether the next forward pass begins another step
        self.calls: list[bool] = []  # in progress, outermost first: made with gradients?
        self.together = {p for params in together.values() for p in params}
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        for owner in module.modules():
            own: list[Tensor] = [
                p for p in owner.parameters(recurse=False) if p not in self.together
            ]
            if next(owner.parameters(), None) is not None:
                enter = Hook(self._enter(together.get(owner, own), owner is module))
                leave = Hook(self._leave)
                self.hooks.append(owner.register_forward_pre_hook(enter))
                self.hooks.append(owner.register_forward_hook(leave, always_call=True))

    def in_parts(self, param: Tensor) -> bool:
        """Whether the gradient of ``param`` may come in more than one part."""
        return self.count[param] > 1 and (param in self.in_segment or param in self.together)

    def forget(self, now: bool) -> None:
        """Drops the uses so far: ``now``, or when ``module`` is called with gradients again.

        Until then the backward pass of the last call may still follow.
        """
        self.is_stale = True
        if now:
            self.clear()

    def clear(self) -> None:
        """Forgets all calls: a backward pass has ended."""
        self.made_at = next(_clock)
        self.used_at = 0
        self.is_stale = False
        self.count.clear()
        self.in_segment.clear()
        self.calls.clear()

    def _enter(self, params: list[Tensor], is_whole: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if _in_backward():  # a repetition
                return
            grads = torch.is_grad_enabled()
            if grads and is_whole and self.is_stale:
                self.clear()
            if not self.calls:
                self.is_counting = self.brings_gradients()
            if self.is_counting and (grads or any(self.calls)):
                self.count.update(params)
                self.used_at = next(_clock)
                self.thread = threading.get_ident()
            if not grads and any(self.calls):
                self.in_segment.update(params)
            self.calls.append(grads)

        return hook

    def _leave(self, *_: object) -> None:
        if self.calls and not _in_backward():
            self.calls.pop()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
