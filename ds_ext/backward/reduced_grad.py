"""This rank's runs of gradients, their scaling, and the protocol of their receivers.

The average over ranks, loss scale and clipping are applied when a rule reads.
"""

import abc
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.backward import gradient_config
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement
from ds_ext.ops.executors.unbatched import square_sums_of
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import nonfinite


class ReducedGrad(NamedTuple):
    """This rank's run of a gradient summed over the ranks, padded, and the votes on it."""

    g: Tensor
    bad: Tensor | None = None  # [] bool on the host; None if the host reads no votes
    square: Tensor | None = None  # [], the sum of its squares if that is known
    votes: Tensor | None = None  # [] on the device, for passes; the host does not read them

    def plus(self, other: "ReducedGrad") -> "ReducedGrad":
        """Adds another part of the gradient in place, and returns the sum."""
        bad = other.bad if self.bad is None or other.bad is None else self.bad | other.bad
        votes = other.votes
        if votes is not None and self.votes is not None:
            votes = votes + self.votes
        return ReducedGrad(self.g.add_(other.g), bad, votes=votes)


ReducedGrads: TypeAlias = Mapping[Tensor, ReducedGrad]


class VotedParams(NamedTuple):
    """The positions in a bucket of gradients that the ranks vote on, by the reader of the votes."""

    host: Set[int] = frozenset()  # the host reads the votes before the step
    device: Set[int] = frozenset()  # passes read the votes


class Receiver(abc.ABC):
    """Receives the runs of a backward pass bucket by bucket, in the same order on all ranks."""

    accepts_parts = False  # whether it takes a gradient in parts

    def voted_params(self, params: Sequence[Tensor]) -> VotedParams:
        """Returns the parameters of a bucket whose gradients the ranks vote on: by default none."""
        return VotedParams()

    @abc.abstractmethod
    def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
        """Receives this rank's runs of summed gradients, which it may keep and write to."""


def add_up(
    kept: dict[Tensor, ReducedGrad], grads: ReducedGrads, dtype: torch.dtype | None = None
) -> None:
    """Adds runs to the kept ones, in ``dtype``; None: the accumulator's dtype.

    A new run is kept in its own memory, so that the rest of the gradient can be freed.
    """
    for param, grad in grads.items():
        if param in kept:
            kept[param] = kept[param].plus(grad)
            continue
        g = grad.g.to(dtype or ops.accumulator(grad.g.dtype))
        is_part = g.untyped_storage().nbytes() > g.nbytes
        kept[param] = grad._replace(g=g.clone() if is_part or has_other_users(g) else g)


def has_other_users(x: Tensor) -> bool:
    """Returns whether autograd or another tensor shares the storage of ``x``, if torch can tell."""
    return _use_count is None or _use_count(x.untyped_storage()._cdata) > _SOLE_USER


# Builds of torch 2.6 without CUDA lack this function. Gradients are copied there.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_SOLE_USER = 0
if _use_count is not None:
    _sole = torch.empty(1, dtype=torch.uint8, device="cpu")
    _SOLE_USER = _use_count(_sole.untyped_storage()._cdata)


@dataclass
class GradientReader:
    """Converts summed gradients of a scaled loss to averaged, unscaled gradients."""

    layout: Layout
    grad_config: gradient_config.GradientConfig
    loss_scale: float = 1.0  # the factor that the loss was multiplied by before backward

    def unscale(self, placement: Placement) -> float:
        """Returns the factor from a summed gradient of the scaled loss to the mean gradient."""
        return 1 / (self.loss_scale * (placement.grad_divisor if self.grad_config.average else 1))

    def gradient(self, param: Tensor, g: Tensor, shard: Shard, factor: float) -> ops.Gradient:
        """Returns a padded run ``g`` as [len(shard)], times ``factor``, with bounded elements."""
        if g.numel() != (n := len(shard)):
            g = g[:n]
        if param.dtype != g.dtype:
            wide = ops.accumulator(param.dtype)
            if wide != ops.accumulator(g.dtype):  # fp64, reduced or kept in fp32
                g = g.to(wide)
        bound = self.grad_config.max_value or None
        return g if factor == 1 and bound is None else ops.Scaled(g, factor, bound)

    def squares(self, grads: Sequence[tuple[Tensor, ReducedGrad]]) -> Tensor:
        """Returns the sums of squares of unscaled runs, [n] in fp64."""
        shards = self.layout.shards  # without the padding of runs
        own = [grad.g[: len(shards[p])] for p, grad in grads if grad.square is None]
        measured = iter(of_each_dtype(square_sums_of, own) if own else ())
        found = [next(measured) if x.square is None else x.square for _, x in grads]
        return torch.stack(found).to(self.layout.device, torch.float64)

    def upper_bounds(self) -> Tensor:
        """Returns the largest allowed sums of squares of mean gradients, in the model's order."""
        weights = self.layout.weights
        bounds = [float(nonfinite.upper_bound(max(1, w.numel), w.dtype)) for w in weights]
        return torch.tensor(bounds, dtype=torch.float64, device="cpu")


def of_each_dtype(op: Callable[[Sequence[Tensor]], Tensor], flats: Sequence[Tensor]) -> Tensor:
    """Calls ``op`` once per dtype; returns its numbers for the flat tensors, [n] in fp64."""
    dtypes = dict.fromkeys(flat.dtype for flat in flats)
    if len(dtypes) == 1:
        return op(flats).double()
    found: dict[int, Tensor] = {}
    for dtype in dtypes:
        numbers = [i for i, flat in enumerate(flats) if flat.dtype == dtype]
        found |= zip(numbers, op([flats[i] for i in numbers]).double(), strict=True)
    return torch.stack([found[i] for i in range(len(flats))])
