"""The layout of a model: the placements of its parameters, and agreement between its ranks."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_ext.distributed import groups
from ds_ext.distributed.consensus import OrderCheck, RanksDifferError
from ds_ext.distributed.groups import Group, communicates, everyone, explained, size_of, wait_for
from ds_ext.distributed.placement import Placement, broadcast
from ds_ext.ops import int8, turns
from ds_ext.ops.shard import Shard


class Agreement(NamedTuple):
    """The ranks' agreement on the gradients that wait to be reduced."""

    ready: list[Tensor]  # parameters to be reduced now, in the same order on all ranks
    in_parts: set[Tensor]  # parameters with a further part on some rank
    ended: bool  # whether backward has ended on all ranks
    second: Tensor | None = None  # a parameter that has a second gradient on some rank


class ParamInfo(NamedTuple):
    """A parameter of the model, on this or another rank."""

    name: str
    numel: int
    dtype: torch.dtype


class Layout:
    """The placements of a model's parameters, and agreement between its ranks.

    Args:
        group: the data-parallel ranks; None for a single process.
        names: the names of all parameters, trained or not, in the same order on all ranks.
        placement_of: returns a parameter's placement.
        device: of sums if there is no parameter; by default the CPU.
    """

    # True for a pipeline stage: other ranks hold other layers. All ranks then end a step together,
    # even those without a gradient in it.
    is_pipeline_stage = False
    # Tied parameters that another stage saves.
    saved_elsewhere: frozenset[Tensor] = frozenset()
    tied_params: frozenset[Tensor] = frozenset()  # which other stages share
    order: OrderCheck | None = None  # of ZeRO-3, where no rank waits for the gradients of others

    def __init__(
        self,
        group: Group,
        names: Mapping[Tensor, str],
        placement_of: Callable[[Tensor], Placement],
        device: torch.device | None = None,
    ) -> None:
        self.group = group
        self.names = names
        self.params = list(names)
        self.number_of = {p: i for i, p in enumerate(names)}
        self.placement_of = {param: placement_of(param) for param in names}
        self.placements = list(dict.fromkeys(self.placement_of.values()))
        # Whether other ranks add to a gradient; whether there is one placement, without tensor
        # parallelism.
        self.sums_gradients = any(placement.is_summed for placement in self.placements)
        self.is_uniform = len(self.placements) == 1 and not self.placements[0].is_divided
        # How many ranks add the same run to a ``total``.
        is_alone = len(self.placements) == 1
        self.num_replicas = {x: 1 if is_alone else x.num_replicas for x in self.placements}
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = size_of(group)
        # Whether this rank knows the gradients of all ranks, so that ``agree`` waits for no message
        self.agrees_at_once = not communicates(group)
        self.is_first = self.rank == 0  # whether this rank logs for all
        self.device = self.params[0].device if names else device or torch.device("cpu")
        self.host_group = groups.for_hosts(group, self.device)
        for placement in self.placements:
            placement.connect(functools.partial(groups.with_own_queue, device=self.device))
        self.shards = with_turns({p: of.shard(p) for p, of in self.placement_of.items()})
        # The parameters of the whole model, in the same order on all its ranks, and the positions
        # of this rank's among them.
        self.weights = [ParamInfo(n, self.shards[p].numel, p.dtype) for p, n in names.items()]
        self.index_of = self.number_of
        self.has_failed = False  # whether an error has ended a backward pass: ZeRO-3 reads it
        self.everyone = everyone()  # the ranks that hold a part of the model
        self.voters = self.everyone  # those that reduce the same buckets
        self.bytes_sent = 0
        self.shapes = [p.shape for p in self.params]
        for param in names:
            with int8.expanded([param]):
                self.run(param)  # makes its elements contiguous before the first step

    def name(self, param: Tensor) -> str:
        """Returns a parameter's name in the model, or a phrase if the model lacks it."""
        return self.names.get(param, "a parameter outside the model")

    def run(self, param: Tensor) -> Tensor:
        """Returns this rank's run of the weight, [len(shard)], which is updated in place."""
        return self.placement_of[param].run(param, self.shards[param])

    def refuse_resized(self) -> None:
        """Raises RuntimeError if a trained parameter was given data of another shape.

        Frozen ones may change: bitsandbytes packs 4-bit weights for a CPU in the first forward.
        """
        if [p.shape for p in self.params] == self.shapes:
            return
        for param, shape in zip(self.params, self.shapes, strict=True):
            if param.requires_grad and not self.has_valid_shape(param, shape):
                raise RuntimeError(
                    f"{self.name(param)} has the shape {[*param.shape]} now, but had {[*shape]} "
                    "when ds_ext took over the model. Nothing was stepped. Resize a model "
                    "(resize_token_embeddings) before deepspeed.initialize or "
                    "fuse_into_backward; or delete the state of the resized parameters (del "
                    "optimizer.state[param]), and call that function again."
                )

    def has_valid_shape(self, param: Tensor, shape: torch.Size) -> bool:
        """Returns whether a parameter that had ``shape`` at first may have its current shape."""
        return param.shape == shape

    def by_placement(self, params: Iterable[Tensor]) -> list[tuple[Placement, list[Tensor]]]:
        """Returns parameters by placement, in the same order on all ranks."""
        if len(self.placements) == 1:
            some = list(params)
            return [(self.placements[0], some)] if some else []
        found: dict[Placement, list[Tensor]] = {placement: [] for placement in self.placements}
        for param in params:
            found[self.placement_of[param]].append(param)
        return [(placement, some) for placement, some in found.items() if some]

    def broadcast(self, module: nn.Module) -> None:
        """Sends the parameters and buffers of the group's first rank to the others."""
        if self.group is not None and self.world > 1:
            source = dist.get_global_rank(self.group, 0)
            params = [*module.parameters()]
            values = [held.stored if (held := int8.find(p)) else p.detach() for p in params]
            for value in (*values, *module.buffers()):
                broadcast(value.detach(), source, self.group)

    def own_leaves(self, params: set[Tensor]) -> set[Tensor]:
        """Returns the leaves of ``params`` in graphs: themselves, unless they are gathered."""
        return params

    def leaves(self, module: nn.Module) -> dict[nn.Module, list[Tensor]]:
        """Returns ZeRO-3's leaf modules, whose gradients arrive together, even if unused."""
        return {}

    def units(self) -> dict[nn.Module, list[Tensor]]:
        """Returns modules whose gradients arrive when backward leaves a call of them: FSDP2's."""
        return {}

    def hook(self) -> list[RemovableHandle]:
        """Hooks the model if some of its gradients would not arrive otherwise."""
        return []

    def brings_gradients(self) -> bool:
        """Returns whether the next backward pass computes complete gradients, not only parts."""
        return True

    def has_kept(self) -> bool:
        """Returns whether FSDP2 holds gradients that the next backward pass will add to."""
        return False

    def agree(
        self,
        waiting: list[Tensor],
        in_parts: set[Tensor],
        ended: bool,
        history: int,
        second: Tensor | None = None,
    ) -> Callable[[], Agreement]:
        """Asks the other ranks which gradients can be reduced; returns a wait for the answer.

        Ranks may use different parameters in a step (mixtures of experts). A gradient is ready if
        all ranks have it, or if some have it and backward has ended on all. All ranks call this
        equally often in a pass. If an error ended the pass of some ranks earlier, the next call of
        these ranks meets one of that pass, on other ranks.

        Args:
            waiting: parameters with a gradient.
            in_parts: those of them for which a further part may come.
            ended: whether backward has ended on this rank.
            history: ``Buckets.history``.
            second: a parameter that has a second gradient on this rank.

        Raises:
            RuntimeError: the answer, on all ranks, if their histories differ.
        """
        if self.agrees_at_once:
            if self.order is not None:
                self.bytes_sent += self.order.check_gradients(waiting, in_parts, ended, history)
            return lambda: Agreement(waiting, in_parts, True, second)
        counts = torch.zeros(2, len(self.params) + 1, dtype=torch.int32, device="cpu")
        for row, params in zip(counts, (waiting, in_parts), strict=True):
            numbers = [self.number_of[p] for p in params]
            row[torch.tensor(numbers, dtype=torch.int64, device="cpu")] = 1
        if second is not None:
            counts[1, self.number_of[second]] = -self.world  # negative in the sum too
        counts[0, -1] = ended
        counts[1, -1] = own_history = history % 2**16
        self.bytes_sent += counts.nbytes
        with explained():
            work = dist.all_reduce(counts, group=self.host_group, async_op=True)
        wait = wait_for([work.wait])

        def answer() -> Agreement:
            wait()
            if int(counts[1, -1]) != own_history * self.world:
                raise RanksDifferError(history)
            all_ended = int(counts[0, -1]) == self.world
            found, more = counts[:, :-1]
            again = [self.params[i] for i in (more < 0).nonzero().flatten().tolist()]
            is_ready = found >= (1 if all_ended else self.world)
            ready, in_parts = (
                [self.params[i] for i in which.nonzero().flatten().tolist()]
                for which in (is_ready, is_ready & (more > 0))
            )
            return Agreement(ready, set(in_parts), all_ended, next(iter(again), None))

        return answer

    def reduce(
        self, params: Sequence[Tensor], flats: Sequence[Tensor], votes: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, Callable[[], None]]:
        """Begins to sum flat gradients in place; returns this rank's runs, votes, and a wait.

        With a uniform placement, votes are sent with the gradients, else by a separate all-reduce.
        """
        first = self.placements[0] if self.is_uniform else None
        are_sent_along = first is not None and (first.group or first.replicas) is not None
        flat_of, waits = dict(zip(params, flats, strict=True)), []
        run_of: dict[Tensor, Tensor] = {}
        for placement, some in self.by_placement(params):
            sent = [flat_of[p] for p in some]
            if votes is not None and are_sent_along:
                sent.append(votes.repeat(placement.num_shards))
            reduced, wait = placement.reduce(sent)
            if votes is not None and are_sent_along:
                votes = reduced.pop()
            run_of |= zip(some, reduced, strict=True)
            waits.append(wait)
        if votes is not None and not are_sent_along and communicates(self.voters):
            self.bytes_sent += votes.nbytes
            with explained():
                waits.append(dist.all_reduce(votes, group=self.voters, async_op=True).wait)
        return [run_of[p] for p in params], votes, wait_for(waits)

    def total(self, sums: Tensor) -> Tensor:
        """Returns the total over the model of sums of runs, divided by their ``num_replicas``."""
        sums = sums.clone()
        if len(self.placements) == 1 and not self.is_pipeline_stage:
            self.placements[0].all_reduce(sums)
            return sums
        return self._all_reduce(sums, self.everyone)

    def _all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """Adds up ``x`` in place over the ranks of a group, and returns it."""
        self.bytes_sent += x.nbytes
        with explained():
            dist.all_reduce(x, group=group)
        return x

    def any(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on any rank of the model; all ranks call it."""
        group = self.group if self.is_uniform else self.everyone
        if not communicates(group):
            return flag
        votes = torch.tensor(float(flag), dtype=torch.float32, device=self.device)
        return bool(self._all_reduce(votes, group))

    def take_bytes_sent(self) -> int:
        """Returns the bytes passed to collectives since the last call."""
        sent, self.bytes_sent = self.bytes_sent, 0
        for placement in self.placements:
            sent += placement.bytes_sent
            placement.bytes_sent = 0
        return sent

    def stored(self) -> list[Tensor]:
        """Returns the tensors that store the model's weights on this rank."""
        return self.params

    def publish(self, params: Iterable[Tensor]) -> None:
        """Sends updated runs to the ranks that hold the whole parameter."""
        for placement, some in self.by_placement(params):
            placement.publish(some)

    def tied(self, kept: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Returns the sums of kept gradients of weights that other stages share."""
        return {}

    def in_step(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns parameters with kept gradients, divided by whether they may share a bucket."""
        return [list(params)]

    def end_step(self) -> None:
        """Called when a step has ended that changed weights."""


def with_turns(shards: Mapping[Tensor, Shard]) -> dict[Tensor, Shard]:
    """Returns shards whose turns share the work on all matrices; a bucket prefers these turns."""
    params = []
    for shard in shards.values():
        ranks, (short, long) = len(shard.starts), sorted((shard.rows, shard.cols))
        # Embeddings, which rules with such work leave out, count as the largest matrices of layers.
        cost = float(short**2 * min(long, 4 * short))
        params.append(turns.SharedParam(0, ranks, (turns.SharedWork(cost, ranks),)))
    chosen = zip(shards.items(), turns.balanced(tuple(params)), strict=True)
    return {param: dataclasses.replace(shard, turn=turn) for (param, shard), turn in chosen}
