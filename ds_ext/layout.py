"""Where the run of a parameter lies that a rank owns, how its gradient arrives, what is published.

| layout       | weight kept | run   | gradient       | after the update   | sums over |
|--------------|-------------|-------|----------------|--------------------|-----------|
| `Replicated` | all         | all   | all-reduce     | nothing            | one rank  |
| `Sharded`    | all         | 1/d   | reduce-scatter | all-gather of runs | d ranks   |

ZeRO-3's, where a rank keeps its run alone, is with DeepSpeed's partitions in zero.py.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.lost import explained
from ds_ext.shard import Shard

Group: TypeAlias = "dist.ProcessGroup | None"  # None: all ranks

# As torch 2.13 calls them, and as it did before.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        self.bytes_sent = 0  # handed to collectives by this rank, on the optimizer's behalf
        for param in names:
            if not param.is_contiguous():
                param.data = param.data.contiguous()  # a run is a view

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
        counts = torch.tensor([*own, [ended, False]], dtype=torch.int32, device=self.device)
        self._sum(counts)
        *found, (ends, _) = counts.tolist()
        needed = 1 if ends == self.world else self.world
        ready = {p: more > 0 for p, (n, more) in zip(params, found, strict=True) if n >= needed}
        return Agreement(list(ready), {p for p in ready if ready[p]}, ends == self.world)

    def reduce(self, flats: Iterable[Tensor]) -> list[Tensor]:
        """Sums flat gradients over the ranks, in place -> this rank's runs of them."""
        return [self._reduce(flat) for flat in flats]

    def _reduce(self, flat: Tensor) -> Tensor:
        self._sum(flat)
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

    def _reduce(self, flat: Tensor) -> Tensor:
        run = flat.view(self.world, -1)[self.rank]
        if self.world > 1:
            self.bytes_sent += flat.nbytes
            with explained():
                _REDUCE_SCATTER(run, flat, group=self.group)
        return run

    def all_reduce(self, sums: Tensor) -> None:
        self._sum(sums)

    def publish(self, params: Iterable[Tensor]) -> None:
        if self.world == 1:
            return
        for param in params:
            flat = param.data.view(-1)
            size = -(-flat.numel() // self.world)
            whole = flat
            if size * self.world > flat.numel():
                whole = torch.empty(size * self.world, dtype=flat.dtype, device=flat.device)
            part = whole.view(self.world, size)[self.rank]
            run = self.run(param)
            part[: len(run)].copy_(run)
            self.bytes_sent += part.nbytes
            with explained():
                _ALL_GATHER(whole, part, group=self.group)
            if whole is not flat:
                flat.copy_(whole[: flat.numel()])
