"""Sums travel on process groups of their own where collectives wait for each other.

Here over gloo, where they need not.
"""

import os
import signal
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_ext
from ds_ext.backward.buckets import Buckets
from ds_ext.distributed import groups
from ds_ext.distributed.placement import Sharded
from tests import worlds
from tests.common import engines
from tests.common.streams import simulated
from tests.distributed.test_faults import LOST

STAGES = (3, 2)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.Tanh(), torch.nn.Linear(9, 10))


def trained(stage: int) -> dict[str, torch.Tensor]:
    """Weights after three steps of CAME, whose rules take rounds."""
    came = {"type": "CAME", "params": {"lr": 0.1}}
    engine = engines.start(model(), None, stage, optimizer=came, zero={"overlap_comm": True})
    weights = engines.trained(engine, loss_of, 3)["after"]
    engine.destroy()
    return weights


def loss_of(engine: Any, number: int, rank: int) -> torch.Tensor:
    return engine(engines.rows(number, rank, 2, 12)).square().sum()


def twice() -> dict[str, Any]:
    """The same training on the groups of DeepSpeed, and twice with a group for our collectives."""
    plain = [trained(stage) for stage in STAGES]
    counts, used, reducing = [], set(), set()
    add_up, reduce = dist.all_reduce, Sharded._begin_sum

    def noted(x: torch.Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
        used.add(group)
        return add_up(x, *args, group=group, **more)

    def reduced(placement: Sharded, *tensors: list[torch.Tensor]) -> Any:
        reducing.add(placement.group)
        used.add(placement.publish_group)
        return reduce(placement, *tensors)

    with (
        mock.patch.object(groups, "WITHOUT_QUEUES", set()),
        mock.patch("torch.distributed.all_reduce", noted),
        mock.patch.object(Sharded, "_begin_sum", reduced),
    ):
        apart = []
        for stage in (*STAGES, *STAGES):
            apart.append(trained(stage))
            counts.append(len(dist.distributed_c10d._world.pg_map))
    own = {queue: group for (_, queue, _), group in groups._made.items()}
    is_used = reducing == {own["reductions"]} and own["steps"] in used and not used & reducing
    return {"plain": plain, "apart": apart, "counts": counts, "is_used": is_used}


def on_streams() -> dict[str, Any]:
    """The same training plainly and with simulated streams of a GPU, and what ran too early."""
    stages = (3, 2, 0)
    plain = [trained(stage) for stage in stages]
    ahead: list[list[bool]] = []  # whether a bucket's question was left open, by stage
    flush = Buckets.flush

    def noted(buckets: Buckets, ended: bool = False) -> bool:
        result = flush(buckets, ended)
        ahead[-1].append(buckets.asked is not None)
        return result

    found, errors = [], []
    with mock.patch.object(Buckets, "flush", noted):
        for stage in stages:
            ahead.append([])
            with simulated() as gpu:
                found.append(trained(stage))
            errors += gpu.errors
    return {"plain": plain, "found": found, "errors": errors, "ahead": [*map(any, ahead)]}


def limits() -> list[float]:
    """How long the group waits that a layout without an engine makes, and that of an engine."""
    found = []
    with mock.patch.object(groups, "WITHOUT_QUEUES", set()):
        shorter = dist.new_group([0, 1], timeout=timedelta(seconds=77))
        own = groups.with_own_queue(shorter, torch.device("cpu"))
        found.append(own._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        trained(3)
        own = groups._made[None, "steps", (0, 1)]
        found.append(own._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    everyone = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [*found, everyone.options._timeout.total_seconds()]


def renewed() -> int:
    """How many groups of one kind could be made, each after the one before was destroyed."""
    with mock.patch.object(groups, "WITHOUT_QUEUES", set()):
        for _ in range(4):
            own = groups.with_own_queue(dist.group.WORLD, torch.device("cpu"))
            dist.all_reduce(torch.ones(1), group=own)
            dist.destroy_process_group(own)
    return sum(groups._counts.values())


def killed(has_own_groups: bool) -> None:
    """A rank killed in its third backward pass, without an engine."""
    module = model()
    optimizer = ds_ext.CAME(module.parameters())
    shared = set() if has_own_groups else groups.WITHOUT_QUEUES
    with mock.patch.object(groups, "WITHOUT_QUEUES", shared):
        ds_ext.fuse_into_backward(module, optimizer)
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            module(torch.randn(2, 12)).sum().backward()
            optimizer.step()


def test_a_group_of_their_own_gives_the_same_bits_and_is_made_once():
    for rank in worlds.run(2, twice):
        for stage, weights in enumerate(rank["apart"]):
            plain = rank["plain"][stage % len(STAGES)]
            assert weights.keys() == plain.keys()
            assert all(weights[name].equal(plain[name]) for name in plain)
        assert rank["is_used"] and len(set(rank["counts"])) == 1


def test_streams_change_no_bit_and_nothing_runs_too_early():
    for rank in worlds.run(2, on_streams):
        assert rank["errors"] == []
        for plain, found in zip(rank["plain"], rank["found"], strict=True):
            assert all(found[name].equal(plain[name]) for name in plain)
        assert rank["ahead"] == [False, True, True]  # stages 3, 2, 0: at stage 3 ranks need not ask


def test_it_waits_as_long_as_the_others():
    for before, in_engine, of_all in worlds.run(2, limits):
        assert before == 77
        assert in_engine == of_all != 77


def test_a_group_that_was_destroyed_is_made_anew():
    # Torch names it by the number of groups: the next one of this name would wait for the last.
    assert worlds.run(2, renewed, limit=60)[0] >= 4


@pytest.mark.parametrize("has_own_groups", [True, False])
def test_a_lost_rank_is_told_without_an_engine_too(has_own_groups):
    other, victim = worlds.fresh(2, killed, has_own_groups, timeout=60)
    assert (other.code, victim.code) == (1, -9)
    assert LOST in other.output and other.seconds < 30
