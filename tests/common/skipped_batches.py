"""A model whose batches fail or are given up: what follows must not know of it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BAD = 77  # the number of the batch that is skipped
HOW = ("backward", "failed backward", "failed forward", "forward")  # how a batch ends


class Failure(RuntimeError):
    """Such as out of memory."""


class Twice(nn.Module):
    """Its middle is used twice, in checkpointed segments; can fail in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def segment(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(h))

    def forward(self, x: torch.Tensor, fail: str = "") -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = checkpoint(self.segment, h, use_reentrant=True)
        if fail == "failed forward":
            raise Failure
        if fail == "failed backward":
            h.register_hook(_fail)
        h = checkpoint(self.segment, h, use_reentrant=True)
        return self.last(h).square().sum()


def _fail(grad: torch.Tensor) -> None:
    raise Failure


def make() -> Twice:
    torch.manual_seed(0)
    return Twice()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def skip(
    forward: Callable[..., torch.Tensor],
    backward: Callable[[torch.Tensor], object],
    zero_grad: Callable[[], None],
    how: str,
    rank: int,
) -> None:
    """A batch that is given up: after forward, after backward, or in the middle of one."""
    try:
        loss = forward(batch(BAD, rank) * 3, how)
        if how != "forward":
            backward(loss)
    except Failure:
        pass
    zero_grad()
