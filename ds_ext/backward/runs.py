"""This rank's runs of gradients, and who receives them."""

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Run(NamedTuple):
    """This rank's run of a gradient summed over the ranks, padded, and what all ranks say of it."""

    g: Tensor
    # [] on the host, whether any rank's part was not finite; None where the ranks did not vote
    bad: Tensor | None = None
    square: Tensor | None = None  # [], the sum of its squares if that is known
    votes: Tensor | None = None  # [] on the device, which passes judge by: the host reads none

    def plus(self, other: "Run") -> "Run":
        """The sum with a further part, in the memory of this one."""
        bad = other.bad if self.bad is None or other.bad is None else self.bad | other.bad
        votes = other.votes
        if votes is not None and self.votes is not None:
            votes = votes + self.votes
        return Run(self.g.add_(other.g), bad, votes=votes)

    @property
    def is_voted(self) -> bool:
        """Whether the ranks have voted on it."""
        return self.bad is not None or self.votes is not None


class Voters(NamedTuple):
    """Parameters of a bucket on whose gradients ranks are to vote before they come."""

    told: Set[Tensor] = frozenset()  # whose votes the host reads before they are stepped
    untold: Set[Tensor] = frozenset()  # whose votes passes read on the device


NOBODY = Voters()


class Receiver(Protocol):
    """Takes the runs of a backward pass, a bucket at a time, alike on all ranks."""

    adds_up: bool  # whether it takes a gradient in parts

    def voters(self, params: Sequence[Tensor]) -> Voters:
        """Those of a bucket's parameters on whose gradients ranks are to vote."""

    def receive(self, runs: dict[Tensor, Run]) -> None:
        """Takes this rank's runs of summed gradients, which it may keep and write to."""


def apart(run: Run, dtype: torch.dtype) -> Run:
    """A run in memory of its own: it can be added to, and the rest of the gradient be freed."""
    g = run.g.to(dtype)
    is_part = g.untyped_storage().nbytes() > g.nbytes
    return run._replace(g=g.clone() if is_part or has_other_users(g) else g)


def has_other_users(x: Tensor) -> bool:
    """Whether anybody but ``x`` holds its storage, autograd among them, as far as torch tells."""
    return _use_count is None or _storage_users(x) > _SOLE_USER


def _storage_users(x: Tensor) -> int:
    assert _use_count is not None
    found: int = _use_count(x.untyped_storage()._cdata)
    return found


# Builds of torch 2.6 without CUDA have none: gradients are copied there.
_use_count = getattr(torch._C, "_storage_Use_Count", None)
_SOLE_USER = 0
if _use_count is not None:
    _SOLE_USER = _storage_users(torch.empty(1, dtype=torch.uint8, device="cpu"))
