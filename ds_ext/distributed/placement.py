"""Placements: which run of a parameter a rank updates, how gradients reach it and updates leave it.

Parameters with the same distribution share one. d is the number of data-parallel ranks.

| placement    | weight kept | run   | gradient       | after the update   | partial sums     |
|--------------|-------------|-------|----------------|--------------------|------------------|
| `Replicated` | all         | all   | all-reduce     | nothing            | of one rank      |
| `Sharded`    | all         | 1/d   | reduce-scatter | all-gather of runs | added up over d  |

If several groups of d ranks hold replicas of the same runs, each run's sum is all-reduced among its
replicas after the reduce-scatter. Partial sums stay within a group, because replicas have the same.
engine/zero3.py has the placement of ZeRO-3, where a rank keeps only its run. With tensor
parallelism, "all" means the boxes of the matrix that a rank holds, and partial sums are added up
over all ranks that hold a part of it. Unsplit parameters have their own placement, as do experts.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.distributed.rank_failure import explained
from ds_ext.ops.shard import Shard, Split

Group: TypeAlias = "dist.ProcessGroup | None"


def everyone() -> Group:
    """Returns the group of all processes, None without a process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def size_of(group: Group) -> int:
    """Returns how many ranks a group has, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


class TensorParallelShard(NamedTuple):
    """What this rank holds of a parameter that tensor parallelism has split."""

    shape: tuple[int, ...]  # of the whole parameter
    split: Split  # the boxes of it that each rank of the tensor-parallel group holds
    rank: int  # this rank's in that group

    @property
    def start(self) -> int:
        """The number of its first element, where elements are numbered rank by rank."""
        return self.split.first(self.rank)

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.split.numel(self.rank)


class Levels(Protocol):
    """An all-reduce in several collectives: ``hierarchical_all_reduce.HierarchicalAllReduce``."""

    inside: Group
    across: Group

    def add_up(self, sums: Tensor) -> int:
        """Adds up partial sums, in place; returns the bytes handed to collectives."""


class Placement:
    """How parameters are spread over ranks, and the collectives that follow from it.

    This class by itself takes gradients for summed; ``Summed`` ones are summed here.

    Args:
        group: the ranks over which gradients are summed; None for a process alone.
        grad_divisor: how many mean losses a summed gradient is of, by which it is divided to be
            that of their mean; by default the size of ``group``.
        statistics_group: the ranks that each have a run of the same parameters, over which a
            rule's partial sums are added up; None where every rank has all of them.
        tensor_parallel_shards: what this rank holds of the parameters that tensor parallelism
            has split.
        num_replicas: how many ranks have, and update, the same run.

    Attributes:
        num_shards: into how many equal parts a flat gradient is cut.
        shard_index: which of them is this rank's.
        levels: what adds up partial sums in two levels; None for the backend's all-reduce.
        bytes_sent: bytes that this rank has handed to collectives for gradients, statistics and
            updated weights.
    """

    num_shards = 1
    shard_index = 0

    def __init__(
        self,
        group: Group,
        grad_divisor: int | None = None,
        statistics_group: Group = None,
        tensor_parallel_shards: Mapping[Tensor, TensorParallelShard] | None = None,
        num_replicas: int = 1,
    ) -> None:
        self.group = group
        self.world = size_of(group)
        self.grad_divisor = grad_divisor or self.world
        self.statistics_group = statistics_group
        self.tensor_parallel_shards = tensor_parallel_shards or {}
        self.num_replicas = num_replicas
        self.levels: Levels | None = None
        self.bytes_sent = 0

    @property
    def groups(self) -> set[Group]:
        """The groups that its collectives run over."""
        found = {self.group, self.statistics_group}
        return found if self.levels is None else found | {self.levels.inside, self.levels.across}

    @property
    def is_summed(self) -> bool:
        """Whether other ranks add to gradients."""
        return max(self.world, self.grad_divisor) > 1

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold boxes of matrices."""
        return bool(self.tensor_parallel_shards)

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """The shape of what this rank holds of a parameter, before ZeRO-3 cuts it."""
        return tuple(param.shape)

    def shard(self, param: Tensor) -> Shard:
        """The run of a parameter that this rank updates, within the whole parameter."""
        held = self.tensor_parallel_shards.get(param)
        if held is None:
            return Shard.of_rank(self.shape(param), self.shard_index, self.num_shards)
        return Shard.of_split(held.shape, held.split, held.rank, self.shard_index)

    def run(self, param: Tensor) -> Tensor:
        """This rank's run of the weight, [len(shard)], a view that is updated in place."""
        shard, held = self.shard(param), self.tensor_parallel_shards.get(param)
        first = shard.start - (held.start if held else 0)
        return flat(param)[first : first + len(shard)]

    def gradient(self, param: Tensor, grad: Tensor) -> Tensor:
        """What this rank has of a gradient as autograd brings it, not sparse."""
        return grad if grad.layout is torch.strided else grad.to_dense()

    def padded_numel(self, param: Tensor) -> int:
        """Elements of a gradient on this rank, padded to equal parts."""
        held = self.tensor_parallel_shards.get(param)
        return self._padded(held.numel if held else self.shard(param).numel)

    def max_padded_numel(self, param: Tensor) -> int:
        """The same on the rank that holds most, by which buckets are filled alike on all ranks."""
        held = self.tensor_parallel_shards.get(param)
        if held is None:
            return self.padded_numel(param)
        return self._padded(max(map(held.split.numel, range(len(held.split.boxes)))))

    def _padded(self, numel: int) -> int:
        return numel + -numel % self.num_shards

    def reduce(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Returns this rank's runs of gradients that are summed already: as they are.

        Args:
            flats: gradients, each [padded_numel], in the same order on all ranks.

        Returns:
            The runs, and a function that waits for them.
        """
        return list(flats), lambda: None

    def all_reduce(self, sums: Tensor) -> None:
        """Adds up partial sums, [n], in place, over the ranks that share a parameter."""
        if self.levels is not None:
            self.bytes_sent += self.levels.add_up(sums)
        elif size_of(self.statistics_group) > 1:
            self.bytes_sent += sums.nbytes
            with explained():
                dist.all_reduce(sums, group=self.statistics_group)

    def publish(self, params: Iterable[Tensor]) -> None:
        """Brings updated runs to the ranks that hold the whole parameter.

        Autograd is told that it was written to, which kernels do unseen: what else of the
        backward pass has yet to read it raises an error.
        """
        for param in params:
            torch.autograd.graph.increment_version(param)


class Summed(Placement, abc.ABC):
    """Parameters whose gradients are summed over ``group``."""

    def reduce(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begins to sum flat gradients over the ranks, in place, by one collective for each dtype.

        Args:
            flats: gradients, each [padded_numel], in the same order on all ranks.

        Returns:
            This rank's runs of the sums, views of ``flats``, each [padded_numel / num_shards]; and
            a function that waits for them: on a GPU the current stream waits, not the host.

        Raises:
            LostRankError: another rank has ended.
        """
        if self.world == 1:
            return super().reduce(flats)
        self.bytes_sent += self._bytes_of_sum(flats)
        with explained():
            works = [self._begin_sum(alike) for alike in by_dtype(flats)]

        def wait() -> None:
            with explained():
                for work in works:
                    work.wait()

        return [self._own_part(flat) for flat in flats], wait

    @abc.abstractmethod
    def _begin_sum(self, flats: list[Tensor]) -> dist.Work:
        """Begins a collective that leaves this rank's part of the sums in ``_own_part``."""

    def _bytes_of_sum(self, flats: Sequence[Tensor]) -> int:
        """The bytes that this rank hands to collectives for a sum of gradients."""
        return sum(flat.nbytes for flat in flats)

    def _own_part(self, flat: Tensor) -> Tensor:
        """This rank's run, padded, of a flat gradient or weight: a view."""
        return flat.view(self.num_shards, -1)[self.shard_index]


class Replicated(Summed):
    """Parameters that every rank holds and updates whole: ZeRO stage 0, DDP, one process.

    Args: see ``Placement``.
    """

    def __init__(
        self,
        group: Group,
        grad_divisor: int | None = None,
        statistics_group: Group = None,
        tensor_parallel_shards: Mapping[Tensor, TensorParallelShard] | None = None,
    ) -> None:
        super().__init__(
            group, grad_divisor, statistics_group, tensor_parallel_shards, size_of(group)
        )

    def _begin_sum(self, flats: list[Tensor]) -> dist.Work:
        return self.group.allreduce_coalesced(flats)  # type: ignore[union-attr]


class Sharded(Summed):
    """Parameters that every rank holds, updating 1/d of each: ZeRO stages 1 and 2.

    Args:
        group: the d ranks.
        grad_divisor: by default the number of ranks in ``group`` and ``replicas``.
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
        self.replicas = replicas
        self.num_shards = self.world
        self.shard_index = 0 if group is None else dist.get_rank(group)

    def _begin_sum(self, flats: list[Tensor]) -> dist.Work:
        runs = list(map(self._own_part, flats))
        return self.group.reduce_scatter_tensor_coalesced(runs, flats)  # type: ignore[union-attr]

    def reduce(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begins to sum flat gradients over the group, then over replicas; see ``Summed.reduce``.

        All replicas receive the same bits.
        """
        runs, wait = super().reduce(flats)
        if size_of(self.replicas) == 1:
            return runs, wait
        summed = by_dtype(runs)

        def wait_for_both() -> None:
            wait()
            with explained():
                for alike in summed:
                    self.bytes_sent += sum(run.nbytes for run in alike)
                    self.replicas.allreduce_coalesced(alike).wait()  # type: ignore[union-attr]

        return runs, wait_for_both

    def publish(self, params: Iterable[Tensor]) -> None:
        """Gathers the runs of ``params`` that all ranks have updated, into each parameter."""
        super().publish(params)
        if self.world == 1:
            return
        wholes = {param: self._padded_weight(param) for param in params}
        gathered = list(map(as_bytes, wholes.values()))
        runs = list(map(self._own_part, gathered))
        self.bytes_sent += sum(run.nbytes for run in runs)
        with explained():
            self.group.allgather_into_tensor_coalesced(gathered, runs).wait()  # type: ignore[union-attr]
        for param, whole in wholes.items():
            values = flat(param)
            if len(whole) > len(values):
                values.copy_(whole[: len(values)])

    def _padded_weight(self, param: Tensor) -> Tensor:
        """A weight, flat, in equal parts for all ranks: itself, or a copy of this rank's run."""
        values, size = flat(param), self.padded_numel(param)
        if size == len(values):
            return values
        whole = torch.empty(size, dtype=values.dtype, device=values.device)
        run = self.run(param)
        self._own_part(whole)[: len(run)].copy_(run)
        return whole


def flat(param: Tensor) -> Tensor:
    """Returns the elements of a parameter in row-major order: a view, [numel].

    A parameter that lies in memory in another order (``channels_last``) is first put in this one.
    """
    if not param.is_contiguous():
        param.data = param.data.contiguous()
    return param.detach().view(-1)


def broadcast(x: Tensor, source: int, group: Group) -> None:
    """Overwrites ``x`` on all ranks of ``group`` by its values on one, however they lie in memory.

    Of a dimension that was expanded, one index is sent.

    Args:
        x: the tensor, of the same shape and strides on all ranks.
        source: the global rank whose values are sent.
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
    """Returns the memory of a contiguous tensor, [bytes] uint8: any backend moves that."""
    return x.view(-1).view(torch.uint8)


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors of each dtype, in the order in which dtypes are first seen."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return list(found.values())
