"""Which parameters a forward pass uses more than once: their gradients may come in parts."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Uses:
    """How many times the forward passes since the last backward called a parameter's module."""

    def __init__(self, module: nn.Module) -> None:
        self.count: Counter[Tensor] = Counter()
        self.training = False  # whether the model was last called with gradients
        self.hooks = [module.register_forward_pre_hook(self._begin)]
        for owner in module.modules():
            params = [p for p in owner.parameters(recurse=False) if p.requires_grad]
            if params:
                self.hooks.append(owner.register_forward_pre_hook(self._counter(params)))

    def _begin(self, *_: object) -> None:
        if not _in_backward():
            self.training = torch.is_grad_enabled()

    def _counter(self, params: list[Tensor]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            # Under reentrant checkpointing a forward pass that matters runs without gradients,
            # and what runs within backward is a repetition.
            if (self.training or torch.is_grad_enabled()) and not _in_backward():
                self.count.update(params)

        return hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
