"""Domains: where the run of a parameter lies that a rank owns, how its gradient arrives, what is
published. Parameters that are spread alike make one.

| domain       | weight kept | run   | gradient       | after the update   | partial sums     |
|--------------|-------------|-------|----------------|--------------------|------------------|
| `Replicated` | all         | all   | all-reduce     | nothing            | of one rank      |
| `Sharded`    | all         | 1/d   | reduce-scatter | all-gather of runs | added up over d  |

ZeRO-3's, where a rank keeps its run alone, is with DeepSpeed's partitions in partitions.py. With
tensor parallelism "all" is the boxes of the matrix that a rank holds, and partial sums are added
up over all ranks that hold some of it; what is not split is a domain of its own, and so are
experts that only some ranks have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.distributed.lost import explained
from ds_ext.ops.shard import Shard, Split

Group: TypeAlias = "dist.ProcessGroup | None"


def everyone() -> Group:
    """The group of all processes; None where this one is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def size_of(group: Group) -> int:
    """How many ranks a group has."""
    return 1 if group is None else dist.get_world_size(group)


class Held(NamedTuple):
    """What a rank of tensor parallelism holds of a parameter of ``shape``."""

    shape: tuple[int, ...]
    split: Split
    part: int


class Replicated:
    """Parameters that every rank of ``group`` holds and updates: ZeRO stage 0, DDP, one process.

    Gradients are summed over ``group``; they are those of ``losses`` mean losses then. Partial sums
    are added up over ``holders``, the ranks that hold a part of a parameter each, if there are any.
    ``held`` tells what this rank holds of those that tensor parallelism has split. ``copies`` of
    each run exist.
    """

    parts = 1  # equal parts that a gradient is cut into
    place = 0  # which of them is this rank's

    def __init__(
        self,
        group: Group,
        losses: int | None = None,
        holders: Group = None,
        held: Mapping[Tensor, Held] | None = None,
        copies: int = 1,
    ) -> None:
        self.group = group
        self.world = size_of(group)
        self.losses = losses or self.world
        self.holders = holders
        self.held = held or {}
        self.copies = copies
        self.bytes_sent = 0  # handed to collectives by this rank, on the optimizer's behalf

    @property
    def is_summed(self) -> bool:
        """Whether other ranks add to gradients."""
        return max(self.world, self.losses) > 1

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """The shape of what this rank holds of a parameter."""
        return tuple(param.shape)

    def shard(self, param: Tensor) -> Shard:
        held = self.held.get(param)
        if held is None:
            return Shard.of_rank(self.shape(param), self.place, self.parts)
        return Shard.of_split(held.shape, held.split, held.part, self.place)

    def run(self, param: Tensor) -> Tensor:
        """This rank's run of the weight, [len(shard)], to be updated in place."""
        shard, held = self.shard(param), self.held.get(param)
        first = shard.start - (held.split.first(held.part) if held else 0)
        return flat(param)[first : first + len(shard)]

    def numel(self, param: Tensor) -> int:
        """Elements of a gradient, padded to equal parts."""
        held = self.held.get(param)
        return self._padded(held.split.numel(held.part) if held else self.shard(param).numel)

    def counted(self, param: Tensor) -> int:
        """The same as a bucket counts them: alike on all ranks, whatever each holds."""
        held = self.held.get(param)
        if held is None:
            return self.numel(param)
        return self._padded(max(map(held.split.numel, range(len(held.split.boxes)))))

    def _padded(self, numel: int) -> int:
        return numel + -numel % self.parts

    def reduce(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begins to sum flat gradients over the ranks, in place -> this rank's runs, a wait.

        One collective for each dtype. On a GPU what waits is the current stream, not the host.
        """
        if self.world == 1:
            return list(flats), lambda: None
        self.bytes_sent += sum(flat.nbytes for flat in flats)
        with explained():
            works = [self._begin(alike) for alike in by_dtype(flats)]

        def wait() -> None:
            with explained():
                for work in works:
                    work.wait()

        return [self._part(flat) for flat in flats], wait

    def _begin(self, flats: list[Tensor]) -> dist.Work:
        return self.group.allreduce_coalesced(flats)  # type: ignore[union-attr]

    def _part(self, flat: Tensor) -> Tensor:
        """This rank's run, padded, of a flat gradient."""
        return flat

    def all_reduce(self, sums: Tensor) -> None:
        """Adds up partial sums over the ranks that share a parameter, in place."""
        if size_of(self.holders) > 1:
            self.bytes_sent += sums.nbytes
            with explained():
                dist.all_reduce(sums, group=self.holders)

    def publish(self, params: Iterable[Tensor]) -> None:
        """Brings updated runs to the ranks that hold the whole parameter.

        Autograd is told that it was written to, which ``run`` hides from it: what else of the
        backward pass has yet to read it raises an error.
        """
        for param in params:
            torch.autograd.graph.increment_version(param)


class Sharded(Replicated):
    """Parameters that every rank holds, updating 1/d of each: ZeRO stages 1 and 2."""

    def __init__(
        self,
        group: Group,
        losses: int | None = None,
        holders: Group = None,
        held: Mapping[Tensor, Held] | None = None,
        copies: int = 1,
    ) -> None:
        super().__init__(group, losses, holders or group, held, copies)
        self.parts = self.world
        self.place = 0 if group is None else dist.get_rank(group)

    def _begin(self, flats: list[Tensor]) -> dist.Work:
        parts = list(map(self._part, flats))
        return self.group.reduce_scatter_tensor_coalesced(parts, flats)  # type: ignore[union-attr]

    def _part(self, flat: Tensor) -> Tensor:
        return flat.view(self.parts, -1)[self.place]

    def publish(self, params: Iterable[Tensor]) -> None:
        super().publish(params)
        if self.world == 1:
            return
        wholes = {param: self._whole(param) for param in params}
        sent = list(map(as_bytes, wholes.values()))
        parts = list(map(self._part, sent))
        self.bytes_sent += sum(part.nbytes for part in parts)
        with explained():
            self.group.allgather_into_tensor_coalesced(sent, parts).wait()  # type: ignore[union-attr]
        for param, whole in wholes.items():
            values = flat(param)
            if len(whole) > len(values):
                values.copy_(whole[: len(values)])

    def _whole(self, param: Tensor) -> Tensor:
        """A parameter, flat, in equal parts for all ranks: itself, or a copy of this run in it."""
        values, size = flat(param), self.numel(param)
        if size == len(values):
            return values
        whole = torch.empty(size, dtype=values.dtype, device=values.device)
        run = self.run(param)
        self._part(whole)[: len(run)].copy_(run)
        return whole


def flat(param: Tensor) -> Tensor:
    """The elements of a parameter, in their order: a view.

    A parameter that lies in memory in another order (``channels_last``) is first put in this one.
    """
    if not param.is_contiguous():
        param.data = param.data.contiguous()
    return param.data.view(-1)


def broadcast(x: Tensor, source: int, group: Group) -> None:
    """Sends the values of ``x`` from the rank ``source`` to all others, however they lie in memory.

    Of a dimension that was expanded, one is sent.
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
    """The memory of a contiguous tensor, [bytes] uint8: what any backend moves, of any dtype."""
    return x.view(-1).view(torch.uint8)


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each dtype."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return list(found.values())
