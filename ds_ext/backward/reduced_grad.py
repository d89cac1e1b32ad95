"""This rank's runs of gradients, and the protocol of their receivers."""

import abc
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class ReducedGrad(NamedTuple):
    """This rank's run of a gradient summed over the ranks, padded, and the votes on it."""

    g: Tensor
    bad: Tensor | None = None  # [] bool on the host; None if the host reads no votes
    square: Tensor | None = None  # [], the sum of its squares if that is known
    votes: Tensor | None = None  # [] on the device, for kernels; the host does not read them

    def plus(self, other: "ReducedGrad") -> "ReducedGrad":
        """Adds another part of the gradient in place, and returns the sum."""
        bad = other.bad if self.bad is None or other.bad is None else self.bad | other.bad
        votes = other.votes
        if votes is not None and self.votes is not None:
            votes = votes + self.votes
        return ReducedGrad(self.g.add_(other.g), bad, votes=votes)


ReducedGrads: TypeAlias = Mapping[Tensor, ReducedGrad]


class VotedParams(NamedTuple):
    """Parameters of a bucket whose gradients the ranks vote on, by the reader of the votes."""

    host: Set[Tensor] = frozenset()  # the host reads the votes before the step
    device: Set[Tensor] = frozenset()  # kernels read the votes


class Receiver(abc.ABC):
    """Receives the runs of a backward pass bucket by bucket, in the same order on all ranks."""

    accepts_parts = False  # whether it takes a gradient in parts

    def voted_params(self, params: Sequence[Tensor]) -> VotedParams:
        """Returns the parameters of a bucket whose gradients the ranks vote on: by default none."""
        return VotedParams()

    @abc.abstractmethod
    def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
        """Receives this rank's runs of summed gradients, which it may keep and write to."""


def compact_copy(grad: ReducedGrad, dtype: torch.dtype) -> ReducedGrad:
    """Returns a run in its own memory, so that the rest of the gradient can be freed."""
    g = grad.g.to(dtype)
    is_part = g.untyped_storage().nbytes() > g.nbytes
    return grad._replace(g=g.clone() if is_part or has_other_users(g) else g)


def has_other_users(x: Tensor) -> bool:
    """Returns whether autograd or another tensor shares the storage of ``x``, if torch can tell."""
    return _use_count is None or _storage_users(x) > _SOLE_USER


def _storage_users(x: Tensor) -> int:
    assert _use_count is not None
    found: int = _use_count(x.untyped_storage()._cdata)
    return found


# Builds of torch 2.6 without CUDA lack this function. Gradients are copied there.
_use_count = getattr(torch._C, "_storage_Use_Count", None)
_SOLE_USER = 0
if _use_count is not None:
    _SOLE_USER = _storage_users(torch.empty(1, dtype=torch.uint8, device="cpu"))
