"""Counts what a step sends among any number of ranks: ds_ext's code on tensors without storage.

A model's gradients come on torch's device "meta", through ds_ext's own hooks, buckets and layouts,
in a group of ranks that has a size and sends nothing (``reduced``); then the rules step the runs
of every bucket, for ranks of every kind (``Rule``). So sizes and numbers of calls are those of the
code, and of true shapes.
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
from ds_ext.distributed.layout import Agreement, Layout
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
Cut = Callable[[Shape, int, int], Shard]  # a shape, a rank and how many there are
PLACES = 2048  # a multiple of what 8-bit moments share a scale by
NORM = 8  # bytes of the square of the norm, summed once a step


class Bucket(NamedTuple):
    """What every rank of a group sends for one bucket."""

    ranks: int  # of the group
    params: tuple[str, ...]
    place: int  # how many gradients of the model there were when it was full
    agreed: tuple[int, ...]  # bytes of each all-reduce of what ranks tell each other first
    gradients: tuple[int, ...]  # bytes of each reduce-scatter: one, if they are of one dtype
    rounds: tuple[int, ...]  # bytes of each all-reduce of statistics
    published: tuple[int, ...]  # bytes of each all-gather of new weights: stages 1 and 2
    stepped: tuple[str, ...] | None = None  # the parameters of the rounds; None: of the gradients
    summed_by: str = REDUCE_SCATTER  # how gradients are summed

    @property
    def calls(self) -> list[Call]:
        """All of these, in order."""
        kinds = (ALL_REDUCE, self.summed_by, ALL_REDUCE, ALL_GATHER)
        found = zip(kinds, self[3:7], strict=True)
        return [Call("ds_ext", kind, n) for kind, sizes in found for n in sizes]


# Gradients: which buckets there are.


class Pretended:
    """Stands for torch.distributed and for a group of ``world`` ranks; notes calls, sends nothing.

    This process is the first rank. The others have the same numbers, where it has numbers.
    ``everyone`` are all ranks, if there are more.
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

    def all_reduce(self, x: Tensor, group: "Pretended") -> None:
        group.allreduce_coalesced([x])
        if not x.is_meta:
            x.mul_(group.world)

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
        """Of a call, which has ended."""


class Stage2(Layout):
    """The layout of ZeRO stages 1 and 2 on parameters without storage."""

    kind = Sharded

    def __init__(self, group: Any, names: Mapping[Tensor, str]) -> None:
        placement = self.kind(group)
        super().__init__(group, names, lambda param: placement)


class Unpublished(Sharded):
    """Runs of which nobody else holds a copy."""

    publish = Zero3Placement.publish


class Stage3(Stage2):
    """ZeRO-3's: what its partitions add to it is DeepSpeed's, but for these.

    What ranks compare (ds_ext/distributed/desync.py), 16 bytes a bucket from host to host, is not
    counted: a GPU waits for it once a step.
    """

    kind = Unpublished

    def agree(self, waiting: Mapping[Tensor, bool], ended: bool) -> Agreement:
        return Agreement(list(waiting), {p for p, more in waiting.items() if more}, True)


def reduced(
    model: nn.Module,
    backward: Callable[[nn.Module], None],
    shared: Collection[str],
    world: int,
    size: int,
    stage: int,
) -> list[Bucket]:
    """The buckets of one backward pass of a model on "meta", without their rounds.

    ``shared`` are the names of the parameters that these ``world`` ranks share; ``size`` is
    reduce_bucket_size. Calls after the last bucket are a bucket without parameters.
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
    ):
        layout = (Stage3 if stage == 3 else Stage2)(pretended, names)

        def note(params: tuple[str, ...]) -> None:
            at = [i for i, call in enumerate(calls) if call.kind == REDUCE_SCATTER] or [len(calls)]
            parts = calls[: at[0]], calls[at[0] : at[-1] + 1], calls[at[-1] + 1 :]
            before, sent, after = (tuple(call.nbytes for call in part) for part in parts)
            found.append(Bucket(world, params, place, before, sent, (), after))
            calls.clear()

        class Publishing:
            """Takes runs as if parameters had been stepped by them."""

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
            for _ in range(2):  # when backward has ended, and in step()
                buckets.finish()
        buckets.remove()
        if calls:
            note(())
    for hook in hooks:
        hook.remove()
    return found


def zeros_on_hosts() -> Any:
    """What hosts ask for within the context is 0: of gradients it tells that they are good."""
    return mock.patch.object(Tensor, "cpu", lambda x: torch.zeros(x.shape, dtype=x.dtype))


class Owner:
    """Whose parameters are counted: nobody steps them."""

    optimizer: Any = None

    def unfinished(self) -> str:
        return ""

    def discard(self, params: Collection[Tensor]) -> None:
        pass

    def give_way(self) -> None:
        pass


# Rounds: what the rules ask to have summed.


class Matrix(NamedTuple):
    """What one rule steps: a parameter, or one expert of a stack of them."""

    shape: Shape
    stack: Shape  # of the parameter that ZeRO cuts
    first: int  # element of it that the matrix begins at
    keys: tuple[tuple[str, Any], ...] = ()  # of its param group: what a rule is not for has some

    def shard(self, rank: int, world: int, cut: Cut = Shard.of_rank) -> Shard:
        """What a rank owns of it."""
        if self.shape == self.stack:
            return cut(self.shape, rank, world)
        whole, n = cut(self.stack, rank, world), math.prod(self.shape)
        if n % whole.size and whole.size % n:
            raise ValueError(f"--ranks {world}: a rank would hold parts of two of {self.stack}.")
        start, stop = (min(max(at - self.first, 0), n) for at in (whole.start, whole.stop))
        return Shard(self.shape, start, stop, whole.size)


def matrices(shape: Shape, keys: tuple[tuple[str, Any], ...]) -> list[Matrix]:
    """What is stepped of a parameter: the experts of a stack one by one."""
    if len(shape) < 3:
        return [Matrix(shape, shape, 0, keys)]
    n = math.prod(shape[1:])
    return [Matrix(shape[1:], shape, i * n, keys) for i in range(shape[0])]


class Rule:
    """An optimizer with its defaults, and the parameters of a model that it steps.

    ``cut`` says what a rank owns of a parameter: by default ZeRO's runs.
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
        """A bucket with the rounds of the first step, and with those of the second."""
        names = bucket.params if bucket.stepped is None else bucket.stepped
        stepped = [m for name in names for m in self.matrices[name]]
        alone = [self.rounds(matrix, bucket.ranks) for matrix in stepped]
        # In lock-step: what all ask for in a round travels together.
        both = [itertools.zip_longest(*(sizes[i] for sizes in alone), fillvalue=0) for i in (0, 1)]
        return [bucket._replace(rounds=bucket.rounds + tuple(map(sum, s))) for s in both]

    def _rounds(self, matrix: Matrix, world: int) -> list[tuple[int, ...]]:
        """Bytes of each round of two steps of a matrix: the same on all ranks, or AssertionError.

        A rank of each kind is stepped: a run's place in its row, its length, and whether it is
        the first are what rules can tell ranks apart by.
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
        # How weights are rounded says nothing of what is sent, and reads values.
        group = {"params": [param], **dict(matrix.keys)}
        return self.optimizer([group], weight_update="nearest")

    def state_bytes(self, worlds: dict[str, int], ranks: int) -> int:
        """Bytes of state of the rank of ``ranks`` that has most; ``worlds`` share a parameter."""
        total = [0] * ranks
        counts = Counter((m, worlds[name]) for name, ms in self.matrices.items() for m in ms)
        for (matrix, world), count in counts.items():
            param = torch.empty(0)
            rule = self._optimizer(param, matrix).rule_of(param)
            size = accumulator(self.dtype).itemsize
            known: dict[
                tuple[int, int], int
            ] = {}  # by length, and place in rows and groups of 8 bits
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
