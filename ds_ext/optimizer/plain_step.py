"""A step without hooks: parameters that this process holds whole are stepped by their ``grad``."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from ds_ext.ops.shard import Shard
from ds_ext.optimizer.run_updates import RunUpdate

# Elements of parameters that are taken together, at least: the host's time is by bucket.
TOGETHER = 2**28
# The same of rules that are batched: between rounds they hold no matrices, as the others do, but
# sums over rows and columns, and on a GPU up to 1/6 byte an element of tiles' parts of these.
IN_BATCHES = 2**30
# Or sums over rows and columns of them, in memory that is made for the bucket: convolutions have
# nearly as many as elements.
STATISTICS = 2**23


def buckets(params: Iterable[Tensor], together: int = TOGETHER) -> Iterator[list[RunUpdate]]:
    """Yields the updates of those of ``params`` that have a gradient, as many as go together."""
    bucket: list[RunUpdate] = []
    elements = statistics = 0
    for param in params:
        if param.grad is None:
            continue
        shard = Shard.whole(param.shape)
        p = param.detach().contiguous().view(-1)
        bucket.append(RunUpdate(param, p, param.grad.to_dense().contiguous().view(-1), shard))
        elements += shard.numel
        statistics += _statistics(shard)
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


def _statistics(shard: Shard) -> int:
    """How many sums over rows and columns a parameter has."""
    return shard.numel if shard.is_numbers else shard.mats * (shard.rows + shard.cols)
