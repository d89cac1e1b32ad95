"""The ranks share the iterations of Muon, which one rank makes for all, by their cost."""

import dataclasses
import functools

import pytest
import torch

from ds_ext.distributed import layout
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.planner import memory, models
from ds_ext.rules import muon


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


def imbalance(costs):
    """The largest cost of a rank relative to the mean."""
    return max(costs) * len(costs) / sum(costs)


# By layers in a bucket and ranks: with parameter i on rank i, and by cost.
UNEVEN = {
    (1, 3): (1.79, 1.19),
    (3, 3): (1.79, 1.00),
    (3, 8): (1.59, 1.06),
    (4, 8): (1.59, 1.19),
    (3, 2): (1.07, 1.06),
    (4, 64): (3.18, 3.18),  # 20 large matrices
}


@pytest.mark.parametrize("is_numbered", [True, False])
@pytest.mark.parametrize("layers, world", UNEVEN)
def test_ranks_share_a_bucket_of_llama_by_cost(layers, world, is_numbered):
    """Whether a layout has numbered the parameters or not, as in a plain step with DTensors."""
    numbers = [*llama()][35 : 35 + 7 * layers]  # from layer 5 on
    shapes, by_number, by_cost = [llama()[i] for i in numbers], [0] * world, []
    for i, shape in zip(numbers, shapes, strict=True):
        by_number[i % world] += min(shape) ** 3
    for rank in range(world):
        turn = numbers.__getitem__ if is_numbered else (lambda i: 0)
        optimizer, updates = begun(shapes, rank, world, turn)
        shards = [u.shard for u in optimizer.begin(updates).alone]
        by_cost.append(sum(min(s.shape) ** 3 for s in shards if s.has_turn))
    assert sum(by_cost) == sum(by_number)  # one rank has each turn
    found = imbalance(by_number), imbalance(by_cost)
    assert found == pytest.approx(UNEVEN[layers, world], abs=0.006)


@pytest.mark.parametrize("world, before, now", [(3, 1.79, 1.02), (8, 1.0, 1.01), (64, 1.6, 1.2)])
def test_ranks_share_a_model_whose_buckets_hold_one_matrix(world, before, now):
    names = memory.shapes_of(models.skeleton(models.config("llama-3.1-8b")))
    shards = layout.with_turns({p: Shard.of_rank(s, 0, world) for p, s in names.items()})
    chosen = [shard.turn for shard in shards.values()]
    by_number, by_cost = [0] * world, [0] * world
    for i, shape in llama().items():
        by_number[i % world] += min(shape) ** 3
        by_cost[chosen[i]] += min(shape) ** 3
    assert imbalance(by_number) == pytest.approx(before, abs=0.01)
    assert imbalance(by_cost) <= now


@pytest.mark.parametrize(
    "shapes, world, how, most",
    [
        ([(16, 16), (4, 16), (4, 16), (16, 16), (48, 16), (16, 48)], 3, {}, 2 * 16**3),
        ([(16, 8), (16, 8)], 4, {"heads": 2}, 8**3),
        ([(8, 16), (8, 16)], 4, {"heads": 2, "split_dim": 1}, 8**3),
        ([(4, 8, 8), (4, 8, 8)], 8, {"stacks": (0, 1)}, 8**3),
        ([(8, 8), (8, 8)], 1, {}, 0),  # without sharing
    ],
)
def test_one_rank_iterates_on_each_matrix_section_and_expert(shapes, world, how, most, monkeypatch):
    sides, iterate, costs = [], muon.polynomial, []

    def noting(gram, *how):
        sides.extend([gram.shape[1]] * len(gram))
        return iterate(gram, *how)

    monkeypatch.setattr(muon, "polynomial", noting)
    for rank in range(world):
        sides.clear()
        optimizer, updates = begun(shapes, rank, world, lambda i: 2 * i, **how)
        optimizer.update(updates, lambda x: None)
        costs.append(sum(n**3 for n in sides))
    assert max(costs) == most
