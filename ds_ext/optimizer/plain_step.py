"""The step without hooks: parameters are stepped by their ``grad``, bucket by bucket.

A process holds plain parameters completely. It holds a part of each DTensor, and the ranks
all-reduce the sums of DTensors.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ds_ext.distributed.placement import Placement
from ds_ext.ops.shard import Shard
from ds_ext.optimizer.bucket_optimizer import BucketOptimizer
from ds_ext.optimizer.updates import RunUpdate

# The least elements of a bucket: host time is spent per bucket.
BUCKET_ELEMENTS = 2**28
# The same if all rules are batched. Between rounds they hold row and column sums instead of
# matrices, and on a GPU up to 1/6 byte per element for the partial sums of tiles.
BATCHED_BUCKET_ELEMENTS = 2**30
# The most row and column sums of a bucket. Convolutions have nearly as many sums as elements.
BUCKET_SUMS = 2**23

# Checks of an optimizer that finds no gradients; ds_ext.backward adds its own.
WITHOUT_GRADIENTS: list[Callable[[BucketOptimizer], None]] = []


def step(optimizer: BucketOptimizer) -> None:
    """Steps all parameters of an optimizer that have a gradient.

    Raises:
        ValueError: a hyper-parameter was set to a value that is not allowed, or a parameter or its
            state cannot be stepped. No weight has changed.
    """
    optimizer.check_param_groups()
    stepped = [p for p in optimizer.index.number_of if p.grad is not None]
    for check in () if stepped else WITHOUT_GRADIENTS:
        check(optimizer)
    size = BATCHED_BUCKET_ELEMENTS if optimizer.are_all_batched else BUCKET_ELEMENTS
    by_placement: dict[Placement | None, list[Tensor]] = {None: stepped}
    if optimizer.index.has_dtensors:
        by_placement = {}  # in the same order on all ranks
        for param in stepped:
            by_placement.setdefault(optimizer.placement(param), []).append(param)
    found = [
        (placement, bucket)
        for placement, params in by_placement.items()
        for bucket in buckets(params, size, placement)
    ]
    # ``update`` checks a bucket before it steps it
    if len(found) > 1:
        optimizer.check_states(updates(bucket, placement) for placement, bucket in found)
    for placement, bucket in found:
        some = updates(bucket, placement)  # some are copies: those of one bucket at a time
        optimizer.update(some, placement)
        for param, p, *_ in some if placement is None else ():
            if not param.is_contiguous():  # its run is a copy
                param.copy_(p.view_as(param))
        optimizer.commit_weight_norms()


def buckets(
    params: Iterable[Tensor], size: int = BUCKET_ELEMENTS, placement: Placement | None = None
) -> Iterator[list[Tensor]]:
    """Divides parameters with gradients into buckets."""
    bucket: list[Tensor] = []
    elements = statistics = 0
    for param in params:
        shard = Shard.whole(param.shape) if placement is None else placement.shard(param)
        bucket.append(param)
        elements += shard.numel
        statistics += shard.statistics
        if elements >= size or statistics >= BUCKET_SUMS:
            yield bucket
            bucket, elements, statistics = [], 0, 0
    if bucket:
        yield bucket


def updates(params: Iterable[Tensor], placement: Placement | None = None) -> list[RunUpdate]:
    """Returns the runs of parameters with gradients, and of the gradients."""
    found = []
    for param in params:
        g = param.grad
        assert g is not None
        if placement is None:
            shard, p = Shard.whole(param.shape), param.contiguous().view(-1)
            g = g if g.layout is torch.strided else g.to_dense()
        else:
            shard = placement.shard(param)
            p = placement.run(param, shard)
            g = placement.gradient(param, g)
        found.append(RunUpdate(param, p, g.contiguous().view(-1), shard))
    return found
