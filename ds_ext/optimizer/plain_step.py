"""A step without hooks: parameters are stepped by their ``grad``.

This process holds them whole; of DTensors it holds a part, and sums travel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ds_ext import rules
from ds_ext.distributed import dtensors
from ds_ext.distributed.placement import Placement
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import unfit
from ds_ext.optimizer.run_updates import RunUpdate

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer

# Elements of parameters that are taken together, at least: the host's time is by bucket.
TOGETHER = 2**28
# The same of rules that are batched: between rounds they hold no matrices, as the others do, but
# sums over rows and columns, and on a GPU up to 1/6 byte an element of tiles' parts of these.
IN_BATCHES = 2**30
# Or sums over rows and columns of them, in memory that is made for the bucket: convolutions have
# nearly as many as elements.
STATISTICS = 2**23


AllReduce: TypeAlias = Callable[[Tensor], None]


class Whereabouts:
    """Where the parameters of an optimizer lie, found when they are first stepped."""

    def __init__(self) -> None:
        self._placements = dtensors.Placements()

    def of(self, param: Tensor) -> Placement | None:
        """Returns the placement of a DTensor; None of what this process holds whole."""
        return self._placements.of(param) if dtensors.is_dtensor(param) else None

    def shard(self, param: Tensor) -> Shard:
        """Returns which elements of a parameter this process holds."""
        placement = self.of(param)
        return Shard.whole(param.shape) if placement is None else placement.shard(param)

    def by_sums(
        self, params: Iterable[Tensor]
    ) -> list[tuple[AllReduce | None, Placement | None, list[Tensor]]]:
        """Parameters whose sums travel alike, with what adds them up; alike on all ranks."""
        found: dict[Placement | None, list[Tensor]] = {}
        for param in params:
            found.setdefault(self.of(param), []).append(param)
        return [(None if at is None else at.all_reduce, at, some) for at, some in found.items()]


def step(optimizer: "RuleOptimizer") -> None:
    """Steps all parameters of an optimizer that have a gradient.

    Raises:
        ValueError: a hyper-parameter was set to a value that is not allowed, or a parameter cannot
            be stepped. No weight has moved.
    """
    optimizer.check_param_groups()
    stepped = [p for p in optimizer.number_of if p.grad is not None]
    unfit.refuse_complex(optimizer, stepped)
    for param in stepped:
        if not optimizer.state.get(param):
            unfit.refuse_shape(optimizer, param, optimizer.whereabouts.shard(param))
    kinds = {optimizer.hypers_of(group) for group in optimizer.param_groups}
    together = IN_BATCHES if all(rules.entry_of(k).is_batched for k in kinds) else TOGETHER
    for all_reduce, placement, params in optimizer.whereabouts.by_sums(stepped):
        for updates in buckets(params, together, placement):
            optimizer.update(updates, all_reduce)
            if placement is None:
                write_back(updates)
            optimizer.settle()


def buckets(
    params: Iterable[Tensor], together: int = TOGETHER, placement: Placement | None = None
) -> Iterator[list[RunUpdate]]:
    """Yields the updates of those of ``params`` that have a gradient, as many as go together."""
    bucket: list[RunUpdate] = []
    elements = statistics = 0
    for param in params:
        g = param.grad
        if g is None:
            continue
        if placement is None:
            shard, p = Shard.whole(param.shape), param.contiguous().view(-1)
            g = g if g.layout is torch.strided else g.to_dense()
        else:
            shard, p = placement.shard(param), placement.run(param)
            g = placement.gradient(param, g)
        bucket.append(RunUpdate(param, p, g.contiguous().view(-1), shard))
        elements += shard.numel
        statistics += shard.statistics
        if elements >= together or statistics >= STATISTICS:
            yield bucket
            bucket, elements, statistics = [], 0, 0
    if bucket:
        yield bucket


def write_back(updates: Sequence[RunUpdate]) -> None:
    """Copies what was stepped to the weights whose runs are copies: those not contiguous."""
    for param, p, *_ in updates:
        if not param.is_contiguous():
            param.copy_(p.view_as(param))
