"""Where the run of a parameter lies that a rank owns, how its gradient arrives, what is published.

Parameters that are spread alike make a domain:

| domain       | weight kept | run   | gradient       | after the update   | partial sums     |
|--------------|-------------|-------|----------------|--------------------|------------------|
| `Replicated` | all         | all   | all-reduce     | nothing            | of one rank      |
| `Sharded`    | all         | 1/d   | reduce-scatter | all-gather of runs | added up over d  |

ZeRO-3's, where a rank keeps its run alone, is with DeepSpeed's partitions in partitions.py. With
tensor parallelism "all" is the boxes of the matrix that a rank holds, and partial sums are added
up over all ranks that hold some of it; what is not split is a domain of its own, and so are
experts that only some ranks have. ``Layout`` is the domains of a model.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.lost import explained
from ds_ext.shard import Shard, Split

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
        return param.data.view(-1)[first : first + len(shard)]

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
        """Brings updated runs to the ranks that hold the whole parameter."""


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
        if self.world == 1:
            return
        wholes = {param: self._whole(param) for param in params}
        for alike in by_dtype(wholes.values()):
            parts = list(map(self._part, alike))
            self.bytes_sent += sum(part.nbytes for part in parts)
            with explained():
                self.group.allgather_into_tensor_coalesced(  # type: ignore[union-attr]
                    alike, parts
                ).wait()
        for param, whole in wholes.items():
            flat = param.data.view(-1)
            if len(whole) > len(flat):
                flat.copy_(whole[: len(flat)])

    def _whole(self, param: Tensor) -> Tensor:
        """A parameter, flat, in equal parts for all ranks: itself, or a copy of this run in it."""
        flat, size = param.data.view(-1), self.numel(param)
        if size == len(flat):
            return flat
        whole = torch.empty(size, dtype=flat.dtype, device=flat.device)
        run = self.run(param)
        self._part(whole)[: len(run)].copy_(run)
        return whole


class Agreement(NamedTuple):
    """What the ranks found out about the gradients that wait on them."""

    ready: list[Tensor]  # parameters to be reduced now, in the same order on all ranks
    in_parts: set[Tensor]  # those of which a further part may come on some rank
    ended: bool  # no rank will bring more


class Layout:
    """The domains of a model's parameters, and what its ranks find out together.

    ``names`` has all parameters, those without gradients too; ``group`` are the ranks of data
    parallelism. ``domain_of`` gives a parameter's domain.
    """

    def __init__(
        self,
        group: Group,
        names: Mapping[Tensor, str],
        domain_of: Callable[[Tensor], Replicated],
    ) -> None:
        self.group = group
        self.names = names
        self.of = {param: domain_of(param) for param in names}
        self.domains = list(dict.fromkeys(self.of.values()))
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = size_of(group)
        self.device = next(iter(names)).device if names else torch.device("cpu")
        self.host_group = self._host_group()
        self.shards = {param: domain.shard(param) for param, domain in self.of.items()}
        self.bytes_sent = 0
        for param in names:
            if not param.is_contiguous():
                param.data = param.data.contiguous()  # a run is a view

    def _host_group(self) -> Group:
        """The same ranks, to agree from host to host: what a GPU computes is not waited for."""
        if self.world == 1 or self.device.type == "cpu":
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """All groups that collectives run over."""
        own = {g for domain in self.domains for g in (domain.group, domain.holders)}
        return {g for g in own | {self.group, self.host_group} if g is not None}

    @property
    def is_shared(self) -> bool:
        """Whether other ranks add to a gradient."""
        return any(domain.world > 1 for domain in self.domains)

    def name(self, param: Tensor) -> str:
        return self.names.get(param, "a parameter outside the model")

    def shard(self, param: Tensor) -> Shard:
        return self.shards[param]

    def run(self, param: Tensor) -> Tensor:
        """This rank's run of the weight, [len(shard)], to be updated in place."""
        return self.of[param].run(param)

    def by_domain(self, params: Iterable[Tensor]) -> list[tuple[Replicated, list[Tensor]]]:
        """Parameters by domain, in the same order on all ranks."""
        found: dict[Replicated, list[Tensor]] = {domain: [] for domain in self.domains}
        for param in params:
            found[self.of[param]].append(param)
        return [(domain, some) for domain, some in found.items() if some]

    def broadcast(self, module: nn.Module) -> None:
        """Sends the parameters and buffers of the group's first rank to the others."""
        if self.group is not None and self.world > 1:
            source = dist.get_global_rank(self.group, 0)
            for value in (*module.parameters(), *module.buffers()):
                dist.broadcast(value.detach(), source, group=self.group)

    def leaves(self, module: nn.Module) -> dict[nn.Module, list[Tensor]]:
        """Modules whose parameters arrive together, used or not: ZeRO-3's leaf modules."""
        return {}

    def agree(self, waiting: Mapping[Tensor, bool], ended: bool) -> Agreement:
        """Finds the parameters that can be reduced now. All ranks call it equally often.

        ``waiting`` tells of each parameter whether a further part may come. Ranks may use
        different parameters in a step (mixtures of experts): what all have is ready; what some
        have is ready when backward has ``ended`` on every rank.
        """
        if self.world == 1:
            return Agreement(list(waiting), {p for p, more in waiting.items() if more}, True)
        params = list(self.names)
        own = [[p in waiting, waiting.get(p, False)] for p in params]
        counts = torch.tensor([*own, [ended, False]], dtype=torch.int32)
        self.bytes_sent += counts.nbytes
        with explained():
            dist.all_reduce(counts, group=self.host_group)
        *found, (ends, _) = counts.tolist()
        needed = 1 if ends == self.world else self.world
        ready = {p: more > 0 for p, (n, more) in zip(params, found, strict=True) if n >= needed}
        return Agreement(list(ready), {p for p in ready if ready[p]}, ends == self.world)

    def reduce(
        self, flats: Mapping[Tensor, Tensor], votes: Tensor
    ) -> tuple[dict[Tensor, Tensor], Tensor, Callable[[], None]]:
        """Begins to sum flat gradients, in place -> this rank's runs, the votes added up, a wait.

        Votes travel with the gradients where one domain is all there is; else all ranks, which
        hold parts of the same parameters, add up theirs by themselves.
        """
        runs: dict[Tensor, Tensor] = {}
        waits = []
        for domain, params in self.by_domain(flats):
            sent = [flats[p] for p in params]
            if len(self.domains) == 1:
                sent.append(votes.repeat(domain.parts))
            reduced, wait = domain.reduce(sent)
            if len(self.domains) == 1:
                votes = reduced.pop()
            runs |= zip(params, reduced, strict=True)
            waits.append(wait)
        if len(self.domains) > 1:
            self.bytes_sent += votes.nbytes
            with explained():
                waits.append(dist.all_reduce(votes, group=everyone(), async_op=True).wait)

        def wait_for_all() -> None:
            with explained():
                for wait in waits:
                    wait()

        return {p: runs[p] for p in flats}, votes, wait_for_all

    def copies(self, domain: Replicated) -> int:
        """How many ranks add the same run to a ``total``."""
        return domain.copies if len(self.domains) > 1 else 1

    def total(self, sums: Tensor) -> Tensor:
        """Adds up sums over this rank's runs, divided by their ``copies``, over the model."""
        sums = sums.clone()
        if len(self.domains) == 1:
            self.domains[0].all_reduce(sums)
        else:
            self.bytes_sent += sums.nbytes
            with explained():
                dist.all_reduce(sums, group=everyone())
        return sums

    def take_bytes_sent(self) -> int:
        """Bytes handed to collectives since the last call."""
        sent, self.bytes_sent = self.bytes_sent, 0
        for domain in self.domains:
            sent += domain.bytes_sent
            domain.bytes_sent = 0
        return sent

    def publish(self, params: Iterable[Tensor]) -> None:
        """Brings updated runs to the ranks that hold the whole parameter."""
        for domain, some in self.by_domain(params):
            domain.publish(some)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """A backward pass runs within this context whose graph is run backward once more."""
        yield

    def end_backward(self) -> None:
        """Called when a backward pass has ended."""

    def end_step(self) -> None:
        """Called when a step has ended that changed weights."""


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each dtype."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return list(found.values())
