"""Where the run of a parameter lies that a rank owns, how its gradient arrives, what is published.

| layout       | weight kept | run   | gradient       | after the update   | sums over |
|--------------|-------------|-------|----------------|--------------------|-----------|
| `Replicated` | all         | all   | all-reduce     | nothing            | one rank  |
| `Sharded`    | all         | 1/d   | reduce-scatter | all-gather of runs | d ranks   |

ZeRO-3's, where a rank keeps its run alone, is with DeepSpeed's partitions in zero.py.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.lost import explained
from ds_ext.shard import Shard

Group: TypeAlias = "dist.ProcessGroup | None"  # None: all ranks


class Agreement(NamedTuple):
    """What the ranks found out about the gradients that wait on them."""

    ready: list[Tensor]  # parameters to be reduced now, in the same order on all ranks
    in_parts: set[Tensor]  # those of which a further part may come on some rank
    ended: bool  # no rank will bring more


class Replicated:
    """Every rank holds and updates all of a parameter: ZeRO stage 0, DDP, a single process."""

    parts = 1  # equal parts that a gradient is cut into

    def __init__(self, group: Group, names: Mapping[Tensor, str]) -> None:
        self.group = group
        self.names = names
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.device = next(iter(names)).device if names else torch.device("cpu")
        self.host_group = self._host_group()
        self.bytes_sent = 0  # handed to collectives by this rank, on the optimizer's behalf
        for param in names:
            if not param.is_contiguous():
                param.data = param.data.contiguous()  # a run is a view

    def _host_group(self) -> Group:
        """The same ranks, to agree from host to host: what a GPU computes is not waited for."""
        if self.world == 1 or self.device.type == "cpu":
            return self.group
        ranks = dist.get_process_group_ranks(self._group())
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def _group(self) -> dist.ProcessGroup:
        return self.group or dist.group.WORLD

    def broadcast(self, module: nn.Module) -> None:
        """Sends the parameters and buffers of the group's first rank to the others."""
        if self.world > 1:
            source = dist.get_global_rank(self.group or dist.group.WORLD, 0)
            for value in (*module.parameters(), *module.buffers()):
                dist.broadcast(value.detach(), source, group=self.group)

    def name(self, param: Tensor) -> str:
        return self.names.get(param, "a parameter outside the model")

    def shard(self, param: Tensor) -> Shard:
        return Shard.whole(tuple(param.shape))

    def run(self, param: Tensor) -> Tensor:
        """This rank's run of the weight, [len(shard)], to be updated in place."""
        return param.data.view(-1)

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
        return self._group().allreduce_coalesced(flats)

    def _part(self, flat: Tensor) -> Tensor:
        """This rank's run, padded, of a flat gradient."""
        return flat

    def take_bytes_sent(self) -> int:
        """Bytes handed to collectives since the last call."""
        sent, self.bytes_sent = self.bytes_sent, 0
        return sent

    def _sum(self, x: Tensor) -> None:
        if self.world > 1:
            self.bytes_sent += x.nbytes
            with explained():
                dist.all_reduce(x, group=self.group)

    def all_reduce(self, sums: Tensor) -> None:
        """Adds up partial sums over the ranks that share a parameter, in place."""

    def publish(self, params: Iterable[Tensor]) -> None:
        """Brings updated runs to the ranks that hold the whole parameter."""

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """A backward pass runs within this context whose graph is run backward once more."""
        yield

    def end_backward(self) -> None:
        """Called when a backward pass has ended."""

    def end_step(self) -> None:
        """Called when a step has ended that changed weights."""


class Sharded(Replicated):
    """Every rank holds all of a parameter and updates 1/d of it: ZeRO stages 1 and 2."""

    def __init__(self, group: Group, names: Mapping[Tensor, str]) -> None:
        super().__init__(group, names)
        self.parts = self.world

    def shard(self, param: Tensor) -> Shard:
        return Shard.of_rank(tuple(param.shape), self.rank, self.world)

    def run(self, param: Tensor) -> Tensor:
        shard = self.shard(param)
        return param.data.view(-1)[shard.start : shard.stop]

    def _begin(self, flats: list[Tensor]) -> dist.Work:
        return self._group().reduce_scatter_tensor_coalesced(list(map(self._part, flats)), flats)

    def _part(self, flat: Tensor) -> Tensor:
        return flat.view(self.world, -1)[self.rank]

    def all_reduce(self, sums: Tensor) -> None:
        self._sum(sums)

    def publish(self, params: Iterable[Tensor]) -> None:
        if self.world == 1:
            return
        wholes = {param: self._whole(param) for param in params}
        for alike in by_dtype(wholes.values()):
            parts = list(map(self._part, alike))
            self.bytes_sent += sum(part.nbytes for part in parts)
            with explained():
                self._group().allgather_into_tensor_coalesced(alike, parts).wait()
        for param, whole in wholes.items():
            flat = param.data.view(-1)
            if len(whole) > len(flat):
                flat.copy_(whole[: len(flat)])

    def _whole(self, param: Tensor) -> Tensor:
        """A parameter, flat, in equal parts for all ranks: itself, or a copy of this run in it."""
        flat = param.data.view(-1)
        size = -(-len(flat) // self.world)
        if size * self.world == len(flat):
            return flat
        whole = torch.empty(size * self.world, dtype=flat.dtype, device=flat.device)
        run = self.run(param)
        self._part(whole)[: len(run)].copy_(run)
        return whole


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each dtype."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return list(found.values())
