"""Parameters whose gradient comes in parts: it is not complete when their hook fires.

There are two cases. (1) Several segments of reentrant checkpointing use the weight. Each segment
runs its own backward pass, in which the hooks of all its parameters fire. (2) A module takes its
parameters together (ZeRO-3's leaf modules, FSDP2's units), and the model calls the module more than
once.
"""

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ds_ext.backward.module_hooks import Hook

_clock = itertools.count(1)


class _Calls(threading.local):
    """The calls that a thread is in, outermost first."""

    def __init__(self) -> None:
        self.made: list[bool] = []  # with gradients?


class ModuleCalls:
    """Counts the calls of modules before the next backward pass.

    A call without gradients counts if it is made inside a call with gradients, as in a checkpointed
    segment. Calls during generation between steps do not count. Calls while ``brings_gradients``
    returns False do not count either.
    """

    def __init__(
        self,
        module: nn.Module,
        joint_params: Mapping[nn.Module, list[Tensor]],
        brings_gradients: Callable[[], bool] = lambda: True,
    ) -> None:
        self.brings_gradients = brings_gradients
        self.is_counting = True
        self.count: Counter[Tensor] = Counter()
        self.in_segment: set[Tensor] = set()  # used in a segment that backward runs again
        self.made_at = next(_clock)
        self.used_at = 0  # time of the last counted call; 0: there is none
        self.thread = threading.get_ident()  # of the last counted call
        self.is_stale = False  # whether the next forward pass begins another step
        self.calls = _Calls()
        self.passes = 0  # backward passes that ``thread`` has ended; segments' passes do not count
        self.joint_params = {p for params in joint_params.values() for p in params}
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        for owner in module.modules():
            own = [p for p in owner.parameters(recurse=False) if p not in self.joint_params]
            if next(owner.parameters(), None) is not None:
                params = joint_params.get(owner, own)
                enter = functools.partial(self._enter, params, owner is module)
                self.hooks.append(owner.register_forward_pre_hook(Hook(enter)))
                self.hooks.append(owner.register_forward_hook(Hook(self._leave), always_call=True))

    def in_parts(self, params: Iterable[Tensor]) -> set[Tensor]:
        """Returns those of ``params`` whose gradient may come in more than one part."""
        if not self.in_segment and not self.joint_params:
            return set()
        may_be = (p for p in params if p in self.in_segment or p in self.joint_params)
        return {p for p in may_be if self.count[p] > 1}

    def expect_parts(self, params: Iterable[Tensor]) -> None:
        """Notes that gradients of ``params`` come in parts, though no module may be called."""
        if not _in_backward():
            self.count.update(dict.fromkeys(params, 2))
            self.in_segment.update(params)

    def forget(self, now: bool) -> None:
        """Resets the counts ``now``, or when ``module`` is next called with gradients.

        Until then the backward pass of the last call may still follow.
        """
        self.is_stale = True
        if now:
            self.clear()

    def clear(self) -> None:
        """Resets the counts, after a backward pass has ended."""
        self.made_at = next(_clock)
        self.used_at = 0
        self.is_stale = False
        self.count.clear()
        self.in_segment.clear()
        self.calls.made.clear()

    def _enter(self, params: Iterable[Tensor], is_whole: bool, *_: object) -> None:
        if _in_backward():  # a checkpointed segment runs again
            return
        grads = torch.is_grad_enabled()
        if grads and is_whole and self.is_stale:
            self.clear()
        if not self.calls.made:
            self.is_counting = self.brings_gradients()
        if self.is_counting and (grads or any(self.calls.made)):
            self.count.update(params)
            self.used_at = next(_clock)
            self.thread = threading.get_ident()
        if not grads and any(self.calls.made):
            self.in_segment.update(params)
        self.calls.made.append(grads)

    def _leave(self, *_: object) -> None:
        if self.calls.made and not _in_backward():
            self.calls.made.pop()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
