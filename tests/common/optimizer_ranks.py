"""Optimizers on simulated ranks: each rank's runs of some parameters, and the steps of all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.checkpoint import checks, resharding
from ds_ext.checkpoint.pieces import Pieces
from ds_ext.checkpoint.resharding import OwnedRun
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.updates import RunUpdate
from tests.common.simulated import begin_alone, cut

ALL = slice(None)
Make = Callable[[list[nn.Parameter]], RuleOptimizer]


class Rank:
    """One rank's runs, ``shards``, of the whole parameters ``values``, and its optimizer of them.

    ``place`` is its number, and the number of ranks.
    """

    def __init__(
        self, make: Make, values: Sequence[Tensor], shards: Sequence[Shard], *place: int
    ) -> None:
        self.shards, self.place = shards, place
        self.params = [nn.Parameter(value.detach().clone()) for value in values]
        self.runs = self.cut(values)
        self.optimizer = make(self.params)

    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the rank's runs of whole tensors."""
        return [cut(x, shard) for x, shard in zip(tensors, self.shards, strict=True)]

    def updates(self, grads: Sequence[Tensor]) -> list[RunUpdate]:
        """The runs and what steps them, by whole gradients."""
        return list(map(RunUpdate, self.params, self.runs, self.cut(grads), self.shards))

    @torch.no_grad()
    def begin(self, grads: Sequence[Tensor], bucket: slice = ALL) -> list[lockstep.StepGenerator]:
        """The steps of the runs of a bucket, to be advanced together with those of other ranks."""
        updates = self.updates(grads)[bucket]
        return [steps for u in updates for steps in begin_alone(self.optimizer, u)]

    @property
    def weights(self) -> list[Tensor]:
        """The values of the runs, with their masters."""
        runs = zip(self.params, self.runs, self.shards, strict=True)
        return [self.optimizer.weights(*run) for run in runs]

    @property
    def owned(self) -> dict[Tensor, OwnedRun]:
        """What a checkpoint knows of the runs."""
        runs = enumerate(zip(self.runs, self.shards, strict=True))
        owned = (OwnedRun(str(i), *run, *self.place) for i, run in runs)
        return dict(zip(self.params, owned, strict=True))


def made(make: Make, values: Sequence[Tensor], world: int) -> list[Rank]:
    """The ranks of a world, each with the runs that ZeRO gives it."""
    shapes = [tuple(value.shape) for value in values]
    return [
        Rank(make, values, [Shard.of_rank(shape, rank, world) for shape in shapes], rank, world)
        for rank in range(world)
    ]


def of_rule(
    name: str,
    values: Sequence[Tensor],
    world: int,
    hypers: Mapping[str, Any],
    first: int | None = None,
) -> list[Rank]:
    """The ranks of a rule; ``values`` are stacks whose experts count from ``first``, if any."""

    def make(params: list[nn.Parameter]) -> RuleOptimizer:
        optimizer = OPTIMIZERS[name](params, **hypers)
        optimizer.stacks = {} if first is None else dict.fromkeys(params, first)
        return optimizer

    return made(make, values, world)


def step(ranks: Sequence[Rank], *steps: Sequence[Tensor], bucket: slice = ALL) -> int:
    """Steps ranks by whole gradients, those of each step -> the rounds of the last step."""
    rounds = 0
    for grads in steps:
        with torch.no_grad():
            rounds = lockstep.simulate([rank.begin(grads, bucket) for rank in ranks])
    return rounds


def whole(ranks: Sequence[Rank]) -> list[Tensor]:
    """The whole parameters."""
    runs = zip(*(rank.runs for rank in ranks), strict=True)
    return [torch.cat(x).view(p.shape) for x, p in zip(runs, ranks[0].params, strict=True)]


def load(ranks: Sequence[Rank], others: Sequence[Rank]) -> None:
    """Loads a checkpoint of other ranks."""
    saved = [resharding.save(rank.optimizer, rank.owned) for rank in others]
    for rank in ranks:
        checks.check(Pieces(saved), rank.optimizer, rank.owned, True)
        resharding.load_state(Pieces(saved), rank.optimizer, rank.owned)
        resharding.load_weights(Pieces(saved), rank.optimizer, rank.owned)
