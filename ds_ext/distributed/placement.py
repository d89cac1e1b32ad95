"""Placements: which run of a parameter a rank updates, and its collectives.

Parameters with the same distribution share one. d is the number of data-parallel ranks.

| placement    | weight kept | run   | gradient       | after the update   | partial sums     |
|--------------|-------------|-------|----------------|--------------------|------------------|
| `Replicated` | all         | all   | all-reduce     | nothing            | complete, unsent |
| `Sharded`    | all         | 1/d   | reduce-scatter | all-gather of runs | added up over d  |

On CPUs one all-reduce takes the place of the reduce-scatter, for which gloo makes one for each
gradient. If tensor-parallel ranks hold replicas of a run, its sum is all-reduced among them after
the reduce-scatter. Partial sums stay within the data-parallel ranks: all replicas have the same
ones. engine/zero3.py has the placement of ZeRO-3, where a rank keeps only its run. With tensor
parallelism, "all" means the boxes of the matrix that a rank holds, and partial sums are added up
over all ranks that hold a part of it. Unsplit parameters have their own placement, as do experts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.distributed.groups import Group, communicates, explained, size_of, wait_for
from ds_ext.ops import int8
from ds_ext.ops.exchange import Exchanges
from ds_ext.ops.shard import Shard, TensorParallelSplit


class TensorParallelShard(NamedTuple):
    """This rank's part of a parameter that tensor parallelism has split."""

    shape: tuple[int, ...]  # of the whole parameter
    split: TensorParallelSplit  # the boxes of each rank of the tensor-parallel group
    rank: int  # in that group

    @property
    def start(self) -> int:
        """The index of its first element, with elements numbered rank by rank."""
        return self.split.first(self.rank)

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.split.numel(self.rank)


class Placement:
    """The distribution of parameters over ranks, and its collectives.

    Args:
        group: the ranks over which gradients are summed; None for a single process, and for
            gradients that torch has summed.
        grad_divisor: the number of mean losses in a summed gradient, by which it is divided; by
            default the size of ``group``.
        statistics_group: the ranks that share a parameter and add up a rule's partial sums; None
            if every rank has whole parameters.
        tensor_parallel_shards: this rank's parts of the parameters that tensor parallelism split.
        num_replicas: how many ranks have, and update, the same run; by default all of ``group``.

    Attributes:
        is_summed: whether other ranks add to gradients.
        is_divided: whether ranks hold boxes of matrices.
        sends_gradients, sends_sums: whether ``group`` and ``statistics_group`` communicate.
        num_shards: the number of equal parts of a flat gradient.
        shard_index: the index of this rank's part.
        bytes_sent: bytes that this rank passed to collectives for gradients, sums and weights.
    """

    num_shards = 1
    shard_index = 0
    replicas: Group = None  # other ranks that hold the same runs, over which they are summed too

    def __init__(
        self,
        group: Group,
        grad_divisor: int | None = None,
        statistics_group: Group = None,
        tensor_parallel_shards: Mapping[Tensor, TensorParallelShard] | None = None,
        num_replicas: int | None = None,
    ) -> None:
        self.group = group
        self.world = size_of(group)
        self.grad_divisor = grad_divisor or self.world
        self.is_summed = max(self.world, self.grad_divisor) > 1
        self.statistics_group = statistics_group
        self.sends_gradients = communicates(group)
        self.sends_sums = communicates(statistics_group)
        self.tensor_parallel_shards = tensor_parallel_shards or {}
        self.is_divided = bool(self.tensor_parallel_shards)
        self.num_replicas = num_replicas or self.world
        self.bytes_sent = 0

    def connect(self, with_own_queue: Callable[..., Group]) -> None:
        """Lets the sums of steps use a group with their own queue, as ``groups`` makes it."""
        self.statistics_group = with_own_queue(self.statistics_group)

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Returns the shape of this rank's part of a parameter, before ZeRO-3 partitions it."""
        return tuple(param.shape)

    def shard(self, param: Tensor) -> Shard:
        """Returns this rank's run within the whole parameter."""
        held = self.tensor_parallel_shards.get(param)
        if held is None:
            return Shard.of_rank(self.shape(param), self.shard_index, self.num_shards)
        return Shard.of_split(held.shape, held.split, held.rank, self.shard_index)

    def run(self, param: Tensor, shard: Shard) -> Tensor:
        """Returns this rank's run of the weight, [len(shard)], a view that is updated in place."""
        if self.num_shards == 1:
            return flat(param)
        held = self.tensor_parallel_shards.get(param)
        first = shard.start - (held.start if held else 0)
        return flat(param)[first : first + len(shard)]

    def gradient(self, param: Tensor, grad: Tensor) -> Tensor:
        """Returns this rank's part of a gradient from autograd, as a dense tensor."""
        return grad if grad.layout is torch.strided else grad.to_dense()

    def padded_numel(self, param: Tensor) -> int:
        """Returns the elements of a gradient on this rank, padded to equal parts."""
        held = self.tensor_parallel_shards.get(param)
        return self._padded(held.numel if held else self.shard(param).numel)

    def max_padded_numel(self, param: Tensor) -> int:
        """Returns the same for the rank that holds most, so that all ranks fill buckets alike."""
        held = self.tensor_parallel_shards.get(param)
        if held is None:
            return self.padded_numel(param)
        return self._padded(max(map(held.split.numel, range(len(held.split.boxes)))))

    def _padded(self, numel: int) -> int:
        return numel + -numel % self.num_shards

    def all_reduce(self, sums: Tensor) -> None:
        """Adds up partial sums [n] in place, over the ranks that share a parameter."""
        if self.sends_sums:
            self.bytes_sent += sums.nbytes
            with explained():
                dist.all_reduce(sums, group=self.statistics_group)

    def exchange(self, exchanges: Exchanges) -> None:
        """Sends elements from rank to rank, among the ranks that share a parameter."""
        flat, sizes, received = exchanges.packed(size_of(self.statistics_group))
        found = flat.new_empty(sum(received))
        self.bytes_sent += flat.nbytes
        with explained():
            dist.all_to_all_single(found, flat, received, sizes, group=self.statistics_group)
        exchanges.deliver(found.split(received))

    def publish(self, params: Iterable[Tensor]) -> None:
        """Sends updated runs to the ranks that hold the whole parameter.

        Increments version counters, because kernels write without autograd's knowledge. A node of
        the backward pass that still has to read the old weight then raises an error.
        """
        for param in params:
            torch.autograd.graph.increment_version(param)

    def reduce(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begins to sum flat gradients over the ranks in place, with one collective per dtype.

        Args:
            flats: gradients, each [padded_numel], in the same order on all ranks.

        Returns:
            This rank's runs of the sums, views of ``flats``, each [padded_numel / num_shards]; and
            a function that waits for them: on a GPU the current stream waits, not the host.

        Raises:
            LostRankError: another rank has ended.
        """
        runs, waits = list(flats), []
        if self.sends_gradients:
            runs = list(map(self._own_part, flats))
            self.bytes_sent += sum(flat.nbytes for flat in flats)
            with explained():
                for of_dtype in zip(by_dtype(runs), by_dtype(flats), strict=True):
                    waits.append(self._begin_sum(*of_dtype).wait)
        wait = wait_for(waits)
        if self.replicas is None:
            return runs, wait
        of_dtypes = by_dtype(runs)  # the caller may change the list of runs before it waits

        def wait_for_replicas() -> None:
            """All receive the same bits."""
            wait()
            with explained():
                for alike in of_dtypes:
                    self.bytes_sent += sum(run.nbytes for run in alike)
                    self.replicas.allreduce_coalesced(alike).wait()  # type: ignore[union-attr]

        return runs, wait_for_replicas

    def _begin_sum(self, runs: list[Tensor], flats: list[Tensor]) -> dist.Work:
        """Begins a collective that writes this rank's part of the sums of ``flats`` to ``runs``."""
        return self.group.allreduce_coalesced(flats)  # type: ignore[union-attr]

    def _own_part(self, flat: Tensor) -> Tensor:
        """A view of this rank's padded run of a flat gradient or weight."""
        return flat.view(self.num_shards, -1)[self.shard_index]


class Replicated(Placement):
    """Parameters that every rank holds and updates whole: ZeRO stage 0, DDP or one process."""


class Sharded(Placement):
    """Parameters that every rank holds whole, and updates 1/d of: ZeRO stages 1 and 2.

    Args:
        group: the d ranks that hold one replica.
        grad_divisor: by default the product of the numbers of ranks of ``group`` and ``replicas``.
        statistics_group: by default ``group``.
        tensor_parallel_shards: see ``Placement``.
        replicas: the ranks, one of each group of d, that hold the same runs; None: no replicas.
    """

    def __init__(
        self,
        group: Group,
        grad_divisor: int | None = None,
        statistics_group: Group = None,
        tensor_parallel_shards: Mapping[Tensor, TensorParallelShard] | None = None,
        replicas: Group = None,
    ) -> None:
        num_replicas = size_of(replicas)
        super().__init__(
            group,
            grad_divisor or size_of(group) * num_replicas,
            statistics_group or group,
            tensor_parallel_shards,
            num_replicas,
        )
        self.replicas = replicas if num_replicas > 1 else None
        self.publish_group = group
        self.num_shards = self.world
        self.shard_index = 0 if group is None else dist.get_rank(group)

    def connect(self, with_own_queue: Callable[..., Group]) -> None:
        """Lets reductions use a group, too; updated runs are published in that of steps."""
        super().connect(with_own_queue)
        self.publish_group = with_own_queue(self.group)
        self.group = with_own_queue(self.group, queue="reductions")

    def _begin_sum(self, runs: list[Tensor], flats: list[Tensor]) -> dist.Work:
        return super()._begin_sum(runs, flats) if flats[0].is_cpu else self._scatter(runs, flats)

    def _scatter(self, runs: list[Tensor], flats: list[Tensor]) -> dist.Work:
        return self.group.reduce_scatter_tensor_coalesced(runs, flats)  # type: ignore[union-attr]

    def publish(self, params: Iterable[Tensor]) -> None:
        """All-gathers the updated runs of ``params`` into each parameter."""
        super().publish(params)
        if not self.sends_gradients:
            return
        wholes = {param: self._padded_weight(param) for param in params}
        gathered = list(map(as_bytes, wholes.values()))
        runs = list(map(self._own_part, gathered))
        self.bytes_sent += sum(run.nbytes for run in runs)
        with explained():
            group = self.publish_group
            group.allgather_into_tensor_coalesced(gathered, runs).wait()  # type: ignore[union-attr]
        for param, whole in wholes.items():
            values = flat(param)
            if len(whole) > len(values):
                values.copy_(whole[: len(values)])

    def _padded_weight(self, param: Tensor) -> Tensor:
        """A flat weight, padded to equal parts: itself, or a copy of this rank's run."""
        values, size = flat(param), self.padded_numel(param)
        if size == len(values):
            return values
        whole = torch.empty(size, dtype=values.dtype, device=values.device)
        run = self.run(param, self.shard(param))
        self._own_part(whole)[: len(run)].copy_(run)
        return whole


def flat(param: Tensor) -> Tensor:
    """Returns the elements of a parameter in row-major order: a view, [numel].

    A parameter with another memory format (``channels_last``) is first made contiguous. Weights
    stored in 8 bits have memory only while they are expanded.
    """
    if (held := int8.find(param)) is not None:
        return held.place(param).detach().view(-1)
    if not param.is_contiguous():
        param.data = param.data.contiguous()
    return param.detach().view(-1)


def broadcast(x: Tensor, source: int, group: Group) -> None:
    """Overwrites ``x`` on all ranks of ``group`` by its values on one, for any strides.

    Only one index of an expanded dimension is sent.

    Args:
        x: the tensor, of the same shape and strides on all ranks.
        source: the global rank that sends its values.
        group: the ranks.

    Raises:
        LostRankError: another rank has ended.
    """
    for dim in reversed(range(x.ndim)):
        if x.stride(dim) == 0 and x.shape[dim]:
            x = x.select(dim, 0)
    values = x.contiguous()
    with explained():
        dist.broadcast(as_bytes(values), source, group=group)
    if values is not x:
        x.copy_(values)


def as_bytes(x: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor, [bytes] uint8, which any backend can send."""
    return x.view(-1).view(torch.uint8)


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors of each dtype, with dtypes in order of first occurrence."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return list(found.values())
