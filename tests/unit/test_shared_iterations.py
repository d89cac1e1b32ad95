"""The ranks share the iterations of Muon, which one rank makes for all, by their cost."""

import dataclasses
import functools

import pytest
import torch

from ds_ext.distributed import layout
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.planner import memory, models
from ds_ext.rules import muon, newton_schulz


@functools.cache
def llama():
    """The shapes of the matrices of Llama-3.1-8B's layers, by their number in the model."""
    shapes = memory.shapes_of(models.skeleton(models.config("llama-3.1-8b")))
    numbered = enumerate(shapes.items())
    return {i: shape for i, (name, shape) in numbered if "layers" in name and len(shape) == 2}


def begun(shapes, rank, world, turn, stacks=(), **group):
    """The optimizer and the updates of one bucket on one rank; ``turn`` by position."""
    with torch.device("meta"):
        params = [torch.empty(0) for _ in shapes]
        optimizer = OPTIMIZERS["muon"]([{"params": params, **group}])
        optimizer.stacks = {params[i]: 0 for i in stacks}
        shards = [
            dataclasses.replace(Shard.of_rank(shape, rank, world), turn=turn(i))
            for i, shape in enumerate(shapes)
        ]
        runs = [(torch.empty(len(shard)), torch.empty(len(shard))) for shard in shards]
    updates = zip(params, runs, shards, strict=True)
    return optimizer, [RunUpdate(p, *both, shard) for p, both, shard in updates]


def cost(shape):
    """The multiplications of Muon's iteration on a matrix."""
    return muon.Muon().operations(Shard.whole(tuple(shape)))


def imbalance(costs):
    """The largest cost of a rank relative to the mean."""
    return max(costs) * len(costs) / sum(costs)


# By layers in a bucket and ranks: with parameter i on rank i, and by cost.
UNEVEN = {
    (1, 3): (1.36, 1.08),
    (3, 3): (1.36, 1.00),
    (3, 8): (2.14, 1.43),  # 9 large matrices
    (4, 8): (1.79, 1.07),
    (3, 2): (1.09, 1.02),
    (4, 64): (4.29, 4.29),  # 12 large matrices
}


@pytest.mark.parametrize("is_numbered", [True, False])
@pytest.mark.parametrize("layers, world", UNEVEN)
def test_ranks_share_a_bucket_of_llama_by_cost(layers, world, is_numbered):
    """Whether a layout has numbered the parameters or not, as in a plain step with DTensors."""
    numbers = [*llama()][35 : 35 + 7 * layers]  # from layer 5 on
    shapes, by_number, by_cost = [llama()[i] for i in numbers], [0] * world, []
    for i, shape in zip(numbers, shapes, strict=True):
        by_number[i % world] += cost(shape)
    for rank in range(world):
        turn = numbers.__getitem__ if is_numbered else (lambda i: 0)
        optimizer, updates = begun(shapes, rank, world, turn)
        shards = optimizer.begin(updates).plan.turned
        by_cost.append(sum(cost(s.shape) for s in shards if s.has_turn))
    assert sum(by_cost) == sum(by_number)  # one rank has each turn
    found = imbalance(by_number), imbalance(by_cost)
    assert found == pytest.approx(UNEVEN[layers, world], abs=0.006)


@pytest.mark.parametrize("world, before, now", [(3, 1.36, 1.01), (8, 1.0, 1.02), (64, 1.8, 1.1)])
def test_ranks_share_a_model_whose_buckets_hold_one_matrix(world, before, now):
    names = memory.shapes_of(models.skeleton(models.config("llama-3.1-8b")))
    shards = layout.with_turns({p: Shard.of_rank(s, 0, world) for p, s in names.items()})
    chosen = [shard.turn for shard in shards.values()]
    by_number, by_cost = [0] * world, [0] * world
    for i, shape in llama().items():
        by_number[i % world] += cost(shape)
        by_cost[chosen[i]] += cost(shape)
    found = imbalance(by_number), imbalance(by_cost)
    assert found == pytest.approx((before, now), abs=0.01)


@pytest.mark.parametrize(
    "shapes, world, how, most",  # by a rank: the matrices on which it iterates
    [
        ([(16, 16), (4, 16), (4, 16), (16, 16), (48, 16), (16, 48)], 3, {}, [(48, 16)]),
        ([(16, 8), (16, 8)], 4, {"heads": 2}, [(8, 8)]),
        ([(8, 16), (8, 16)], 4, {"heads": 2, "split_dim": 1}, [(8, 8)]),
        ([(4, 8, 8), (4, 8, 8)], 8, {"stacks": (0, 1)}, [(8, 8)]),
        ([(8, 8), (8, 8)], 1, {}, [(8, 8), (8, 8)]),  # without sharing
    ],
)
def test_one_rank_iterates_on_each_matrix_section_and_expert(shapes, world, how, most, monkeypatch):
    found, iterate, costs = [], newton_schulz.orthogonalized, []

    def noting(x, *how):
        found.extend([x.shape[1:]] * len(x))
        return iterate(x, *how)

    monkeypatch.setattr(newton_schulz, "orthogonalized", noting)
    for rank in range(world):
        found.clear()
        optimizer, updates = begun(shapes, rank, world, lambda i: 2 * i, **how)
        optimizer.update(updates, Alone(rank, world) if world > 1 else None)
        costs.append(sum(map(cost, found)))
    assert max(costs) == sum(map(cost, most))
