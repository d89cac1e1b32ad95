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
from tests.common import engines, models
from tests.common.choose import params
from tests.common.states import same
from tests.common.streams import simulated
from tests.distributed.test_faults import LOST

STAGES = (3, 2)


def trained(stage: int) -> dict[str, torch.Tensor]:
    """Weights after three steps of CAME, whose rules take rounds."""
    came = {"type": "CAME", "params": {"lr": 0.1}}
    model, zero = models.layers(12, 9, 10), {"overlap_comm": True}
    engine = engines.start(model, None, stage, optimizer=came, zero=zero)
    weights = engines.trained(engine, loss_of, 3)["after"]
    engine.destroy()
    return weights


def loss_of(engine: Any, number: int, rank: int) -> torch.Tensor:
    return engine(engines.rows(number, rank, 2, 12)).square().sum()


def twice() -> None:
    """The same bits on the groups of DeepSpeed, and twice with groups of our own, made once."""
    plain = [trained(stage) for stage in STAGES]
    counts, used, reducing = set(), set(), set()
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
        for _ in range(2):
            for stage, weights in zip(STAGES, plain, strict=True):
                assert same(trained(stage), weights)
                counts.add(len(dist.distributed_c10d._world.pg_map))
    own = {queue: group for (_, queue, _), group in groups._made.items()}
    assert reducing == {own["reductions"]} and own["steps"] in used and not used & reducing
    assert len(counts) == 1


def on_streams() -> None:
    """Simulated streams of a GPU change no bit, and nothing runs too early."""
    ahead: list[list[bool]] = []  # whether a bucket's question was left open, by stage
    flush = Buckets.flush

    def noted(buckets: Buckets, ended: bool = False) -> bool:
        result = flush(buckets, ended)
        ahead[-1].append(buckets.asked is not None)
        return result

    for stage in (3, 2, 0):
        plain = trained(stage)
        ahead.append([])
        with mock.patch.object(Buckets, "flush", noted), simulated() as gpu:
            found = trained(stage)
        assert same(plain, found) and not gpu.errors
    assert [*map(any, ahead)] == [False, True, True]  # at stage 3 ranks need not ask


def seconds(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def limits() -> None:
    """The groups that a layout makes without an engine, and that of an engine, wait as others."""
    with mock.patch.object(groups, "WITHOUT_QUEUES", set()):
        shorter = dist.new_group([0, 1], timeout=timedelta(seconds=77))
        assert seconds(groups.with_own_queue(shorter, torch.device("cpu"))) == 77
        trained(3)
        assert seconds(groups._made[None, "steps", (0, 1)]) == seconds(dist.group.WORLD) != 77


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
    module = models.layers(12, 9, 10)
    optimizer = ds_ext.CAME(module.parameters())
    shared = set() if has_own_groups else groups.WITHOUT_QUEUES
    with mock.patch.object(groups, "WITHOUT_QUEUES", shared):
        ds_ext.fuse_into_backward(module, optimizer)
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            module(torch.randn(2, 12)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("job", params([twice, on_streams, limits], [limits]))
def test_groups_and_streams_of_their_own_change_no_bit_and_no_time_limit(job):
    worlds.run(2, job)


def test_a_group_that_was_destroyed_is_made_anew():
    # Torch names it by the number of groups: the next one of this name would wait for the last.
    assert worlds.run(2, renewed, limit=60)[0] >= 4


@pytest.mark.parametrize("has_own_groups", [True, False])
def test_a_lost_rank_is_told_without_an_engine_too(has_own_groups):
    other, victim = worlds.fresh(2, killed, has_own_groups, timeout=60)
    assert (other.code, victim.code) == (1, -9)
    assert LOST in other.output and other.seconds < 30
