"""Counts the bytes that a step sends with any number of ranks, on tensors without storage.

``reduced`` runs a model's backward pass on torch's device "meta" with ds_ext's hooks, buckets and
layouts. The process group has a size but sends nothing. ``Rule`` then steps the runs of each bucket
on one rank of each kind. Sizes and numbers of calls therefore come from ds_ext's own code and from
the models' real shapes.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Call
from ds_ext.backward.buckets import Buckets
from ds_ext.backward.reduced_grad import ReducedGrad, VotedParams
from ds_ext.distributed.layout import Agreement, Layout, complete
from ds_ext.distributed.placement import Sharded
from ds_ext.engine.zero3 import Zero3Placement
from ds_ext.ops import accumulator
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.model_view import ModelView
from ds_ext.optimizer.param_groups import role_groups
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY

Shape = tuple[int, ...]
Cut = Callable[[Shape, int, int], Shard]  # (shape, rank, number of ranks) -> shard
PLACES = 2048  # a multiple of the group sizes of 8-bit moments
NORM = 8  # bytes of the squared norm, summed once per step


class Bucket(NamedTuple):
    """The bytes that each rank of a group sends for one bucket."""

    ranks: int  # the number of ranks of the group
    params: tuple[str, ...]
    place: int  # the number of gradients computed when it was full
    agreed: tuple[int, ...]  # bytes of each all-reduce by which ranks agree
    gradients: tuple[int, ...]  # bytes of each reduce-scatter, one per dtype
    rounds: tuple[int, ...]  # bytes of each all-reduce of statistics
    published: tuple[int, ...]  # bytes of each all-gather of new weights (stages 1, 2)
    stepped: tuple[str, ...] | None = None  # parameters of the rounds; None: ``params``
    summed_by: str = REDUCE_SCATTER  # the collective that sums gradients

    @property
    def calls(self) -> list[Call]:
        """All calls of the bucket, in order."""
        kinds = (ALL_REDUCE, self.summed_by, ALL_REDUCE, ALL_GATHER)
        found = zip(kinds, self[3:7], strict=True)
        return [Call("ds_ext", kind, n) for kind, sizes in found for n in sizes]


# Buckets of gradients.


class Pretended:
    """Replaces torch.distributed and a group of ``world`` ranks. Records calls and sends nothing.

    This process is the first rank. All ranks are assumed to have the same values. ``everyone`` is
    the group of all ranks if it is larger.
    """

    def __init__(self, world: int, everyone: "Pretended | None" = None) -> None:
        self.world = world
        self.calls: list[Call] = []
        self.group = SimpleNamespace(WORLD=everyone or self)

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: object = None) -> int:
        return 0

    def get_world_size(self, group: "Pretended") -> int:
        return group.world

    def all_reduce(self, x: Tensor, group: "Pretended", async_op: bool = False) -> "Pretended":
        group.allreduce_coalesced([x])
        if not x.is_meta:
            x.mul_(group.world)
        return group

    def allreduce_coalesced(self, tensors: Sequence[Tensor]) -> "Pretended":
        return self._note(ALL_REDUCE, tensors)

    def reduce_scatter_tensor_coalesced(
        self, parts: Sequence[Tensor], wholes: Sequence[Tensor]
    ) -> "Pretended":
        return self._note(REDUCE_SCATTER, wholes)

    def allgather_into_tensor_coalesced(
        self, wholes: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> "Pretended":
        return self._note(ALL_GATHER, wholes)

    def _note(self, kind: str, wholes: Sequence[Tensor]) -> "Pretended":
        self.calls.append(Call("ds_ext", kind, sum(x.nbytes for x in wholes)))
        return self

    def wait(self) -> None:
        """Returns at once, because no call is pending."""


class Stage2(Layout):
    """The layout of ZeRO stages 1 and 2 for parameters without storage."""

    kind = Sharded

    def __init__(self, group: Any, names: Mapping[Tensor, str]) -> None:
        placement = self.kind(group)
        super().__init__(group, names, lambda param: placement)


class Unpublished(Sharded):
    """Placement of runs that have no copies on other ranks."""

    publish = Zero3Placement.publish


class Stage3(Stage2):
    """The layout of ZeRO stage 3, without DeepSpeed's gathers.

    It does not count the order check (ds_ext/distributed/desync.py), which sends 16 bytes per
    bucket between hosts. A GPU waits for it once per step.
    """

    kind = Unpublished

    def agree(self, waiting: Mapping[Tensor, bool], ended: bool) -> Callable[[], Agreement]:
        return lambda: complete(waiting)


def reduced(
    model: nn.Module,
    backward: Callable[[nn.Module], None],
    shared: Collection[str],
    world: int,
    size: int,
    stage: int,
) -> list[Bucket]:
    """Returns the buckets of one backward pass of a model on "meta", without the rules' rounds.

    ``shared`` contains the names of the parameters that these ``world`` ranks share. ``size`` is
    reduce_bucket_size. Calls after the last bucket form a bucket without parameters.
    """
    names = {p: name for name, p in model.named_parameters() if name in shared}
    found: list[Bucket] = []
    place = 0

    def arrived(param: Tensor) -> None:
        nonlocal place
        place += 1
        if param not in names:
            param.grad = None

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in model.parameters()]
    pretended = Pretended(world)
    calls = pretended.calls
    with (
        mock.patch("ds_ext.distributed.layout.dist", pretended),
        mock.patch("ds_ext.distributed.placement.dist", pretended),
        mock.patch("ds_ext.distributed.groups.dist", pretended),
    ):
        layout = (Stage3 if stage == 3 else Stage2)(pretended, names)

        def note(params: tuple[str, ...]) -> None:
            at = [i for i, call in enumerate(calls) if call.kind == REDUCE_SCATTER] or [len(calls)]
            parts = calls[: at[0]], calls[at[0] : at[-1] + 1], calls[at[-1] + 1 :]
            before, sent, after = (tuple(call.nbytes for call in part) for part in parts)
            found.append(Bucket(world, params, place, before, sent, (), after))
            calls.clear()

        class Publishing:
            """Receiver that publishes runs as if their parameters had been stepped."""

            adds_up = False

            def voted_params(self, params: Sequence[Tensor]) -> VotedParams:
                return VotedParams(host=set(params))

            def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
                layout.publish(grads)
                note(tuple(names[p] for p in grads))

        owner = Owner()
        buckets = Buckets(
            *(model, layout, size, lambda p: None, lambda: None),
            *(names.__contains__, Publishing, owner),
        )
        with zeros_on_hosts():
            backward(model)
            for _ in range(2):  # at the end of backward, and in step()
                buckets.finish()
        buckets.remove()
        if calls:
            note(())
    for hook in hooks:
        hook.remove()
    return found


def zeros_on_hosts() -> Any:
    """Returns a context in which copies to the host are zeros: all gradients are valid."""
    return mock.patch.object(Tensor, "cpu", lambda x: torch.zeros(x.shape, dtype=x.dtype))


class Owner:
    """The owner of the counted parameters. It steps none of them."""

    optimizer: Any = None
    has_updated = False

    def unfinished(self) -> str:
        return ""

    def discard(self, params: Collection[Tensor]) -> None:
        pass

    def give_way(self) -> None:
        pass


# Rounds of the rules.


class Matrix(NamedTuple):
    """The unit that a rule steps: a parameter, or one expert of a stack."""

    shape: Shape
    stack: Shape  # the shape of the parameter that ZeRO shards
    first: int  # the index of the matrix's first element in the parameter
    keys: tuple[tuple[str, Any], ...] = ()  # of its param group, for another rule

    def shard(self, rank: int, world: int, cut: Cut = Shard.of_rank) -> Shard:
        """Returns the part of the matrix that a rank owns."""
        if self.shape == self.stack:
            return cut(self.shape, rank, world)
        whole, n = cut(self.stack, rank, world), math.prod(self.shape)
        if n % whole.size and whole.size % n:
            raise ValueError(f"--ranks {world}: a rank would hold parts of two of {self.stack}.")
        start, stop = (min(max(at - self.first, 0), n) for at in (whole.start, whole.stop))
        return Shard(self.shape, start, stop, whole.size)


def matrices(shape: Shape, keys: tuple[tuple[str, Any], ...]) -> list[Matrix]:
    """Returns the units of a parameter that are stepped: one for each expert of a stack."""
    if len(shape) < 3:
        return [Matrix(shape, shape, 0, keys)]
    n = math.prod(shape[1:])
    return [Matrix(shape[1:], shape, i * n, keys) for i in range(shape[0])]


class Rule:
    """An optimizer with default settings, and the parameters of a model that it steps.

    ``cut`` returns the part of a parameter that a rank owns. The default is ZeRO's.
    """

    def __init__(self, name: str, model: nn.Module, cut: Cut = Shard.of_rank) -> None:
        self.cut = cut
        self.optimizer = OPTIMIZERS[name.lower()]
        params = dict(model.named_parameters())
        self.dtype = next(iter(params.values())).dtype
        entry, groups = REGISTRY[name.lower()], [{"params": list(params.values())}]
        if entry.roles:
            groups = role_groups(entry, ModelView(model), groups)
        keys = {
            p: tuple((key, value) for key, value in group.items() if key != "params")
            for group in groups
            for p in group["params"]
        }
        self.matrices = {name: matrices(tuple(p.shape), keys[p]) for name, p in params.items()}
        self.rounds = functools.cache(self._rounds)

    def of(self, bucket: Bucket) -> list[Bucket]:
        """Returns the bucket with the rounds of the first step, and with those of the second."""
        names = bucket.params if bucket.stepped is None else bucket.stepped
        stepped = [m for name in names for m in self.matrices[name]]
        alone = [self.rounds(matrix, bucket.ranks) for matrix in stepped]
        # In lock-step: one all-reduce per round for all matrices.
        both = [itertools.zip_longest(*(sizes[i] for sizes in alone), fillvalue=0) for i in (0, 1)]
        return [bucket._replace(rounds=bucket.rounds + tuple(map(sum, s))) for s in both]

    def _rounds(self, matrix: Matrix, world: int) -> list[tuple[int, ...]]:
        """The bytes of each round of a matrix in two steps.

        Raises AssertionError if the ranks differ. One rank of each kind is stepped: rules can only
        distinguish ranks by the length of their run, by its position in a row, and by whether it is
        the first run.
        """
        kinds: dict[tuple[int, bool, int], Shard] = {}
        for shard in (matrix.shard(rank, world, self.cut) for rank in range(world)):
            place = shard.start % shard.cols if shard.is_matrix else 0
            kinds.setdefault((len(shard), shard.start == 0, place), shard)
        found = {tuple(self._steps(matrix, shard)) for shard in kinds.values()}
        assert len(found) == 1, f"ranks differ in the sums that they add to: {found}"
        return list(*found)

    def _steps(self, matrix: Matrix, shard: Shard) -> list[tuple[int, ...]]:
        lengths = (0, len(shard), len(shard))
        param, p, g = (torch.empty(n, dtype=self.dtype, device="meta") for n in lengths)
        optimizer = self._optimizer(param, matrix)
        found = []
        for _ in range(2):
            sizes: list[int] = []
            optimizer.update(
                [RunUpdate(param, p, g, shard)], lambda x, sizes=sizes: sizes.append(x.nbytes)
            )
            found.append(tuple(sizes))
        return found

    def _optimizer(self, param: Tensor, matrix: Matrix) -> RuleOptimizer:
        # Rounding does not change what is sent, but reads values.
        group = {"params": [param], **dict(matrix.keys)}
        return self.optimizer([group], weight_update="nearest")

    def state_bytes(self, worlds: dict[str, int], ranks: int) -> int:
        """Returns the state bytes of the rank with the most state, out of ``ranks`` ranks."""
        total = [0] * ranks
        counts = Counter((m, worlds[name]) for name, ms in self.matrices.items() for m in ms)
        for (matrix, world), count in counts.items():
            param = torch.empty(0)
            rule = self._optimizer(param, matrix).rule_of(param)
            size = accumulator(self.dtype).itemsize
            known: dict[
                tuple[int, int], int
            ] = {}  # by length, and by position in rows and 8-bit groups
            of = []
            for shard in (matrix.shard(rank, world, self.cut) for rank in range(world)):
                kind = len(shard), shard.start % (PLACES * math.prod(matrix.shape[-1:]))
                if kind not in known:
                    known[kind] = sum(
                        math.prod(part.shape) * (part.dtype.itemsize if part.dtype else size)
                        for _, part in leaves(rule.state_spec(shard))
                    )
                of.append(known[kind])
            for rank in range(ranks):
                total[rank] += count * of[rank * world // ranks]
        return max(total)
