"""Which parameters get their gradient in parts, and are not done when a hook of theirs fires.

Weights used again under reentrant checkpointing: its segments run forward without gradients, and
each has a backward pass of its own, in which the hook of every parameter of the segment fires. And
weights of modules that are taken together (ZeRO-3's leaf modules) and are called again.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class Uses:
    """Counts how often the forward passes since the last backward called a parameter's module."""

    def __init__(self, module: nn.Module, together: Mapping[nn.Module, list[Tensor]]) -> None:
        self.count: Counter[Tensor] = Counter()
        self.in_segment: set[Tensor] = set()  # used in a segment that is run again in backward
        self.training = False  # whether the model was last called with gradients
        self.hooks = [module.register_forward_pre_hook(self._begin)]
        self.together = {p for params in together.values() for p in params}
        for owner in module.modules():
            own = [p for p in owner.parameters(recurse=False) if p not in self.together]
            params = together.get(owner, own)
            if params:
                self.hooks.append(owner.register_forward_pre_hook(self._counter(params)))

    def in_parts(self, param: Tensor) -> bool:
        """Whether the gradient of ``param`` may come in more than one part."""
        return self.count[param] > 1 and (param in self.in_segment or param in self.together)

    def clear(self) -> None:
        self.count.clear()
        self.in_segment.clear()

    def _begin(self, *_: object) -> None:
        if not _in_backward():
            self.training = torch.is_grad_enabled()

    def _counter(self, params: list[Tensor]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if _in_backward():  # a repetition
                return
            if torch.is_grad_enabled():
                self.count.update(params)
            elif self.training:
                self.count.update(params)
                self.in_segment.update(params)

        return hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
