"""The worlds of ranks on which tests run their jobs: what becomes of ranks that fail."""

import os
import time

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests import worlds
from tests.common.choose import params


def total(x: float) -> tuple[int, torch.Tensor, int]:
    mine = torch.tensor([x * (dist.get_rank() + 1)])
    dist.all_reduce(mine)
    return dist.get_rank(), mine, os.getpid()


def test_a_world_stays_alive_and_returns_the_results_by_rank():
    first, second = worlds.run(2, total, 1.0), worlds.run(2, total, 2.0)
    assert [rank for rank, *_ in first] == [0, 1]
    assert [float(x) for _, x, _ in (*first, *second)] == [3, 3, 6, 6]
    assert [pid for *_, pid in first] == [pid for *_, pid in second]


def litter() -> None:
    dist.new_group([0, 1])
    deepspeed.utils.groups.mpu = "left behind"
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    os.environ["LITTER"] = "1"


def seen() -> tuple:
    groups = len(dist.distributed_c10d._world.pg_map)
    mpu = deepspeed.utils.groups.mpu
    return groups, mpu, torch.get_default_dtype(), float(torch.rand(())), os.getenv("LITTER")


def test_what_a_job_leaves_behind_is_cleared_away():
    before = worlds.run(2, seen)
    worlds.run(2, litter)
    assert worlds.run(2, seen) == before
    assert before[0][1:3] == (None, torch.float32)


def fail(rank: int) -> None:
    print("said before it failed")
    if dist.get_rank() == rank:
        raise ValueError("this rank fails")
    dist.barrier()


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.1)


FAILING = [
    (fail, ["rank 1 raised", "ValueError: this rank fails", "said before", "in fail"]),
    (die, ["rank 1 died with exit status 7", "rank 0 "]),
    (hang, ["rank 1 had not ended after 2 s", "in hang"]),
]


@pytest.mark.parametrize("job, words", params(FAILING, FAILING[:2]))
def test_a_rank_that_fails_is_told_at_once_and_the_next_job_runs(job, words):
    worlds.run(2, total, 1.0)
    began = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        worlds.run(2, job, 1, limit=2 if job is hang else 60)
    assert time.monotonic() - began < 10
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(worlds.run(2, total, 1.0)) == 2


@pytest.mark.slow
def test_a_fresh_world_tells_how_its_ranks_ended():
    ended = worlds.fresh(2, die, 1)
    assert [rank.code for rank in ended] == [1, 7]
    assert "in die" in ended[0].output
    well = worlds.fresh(2, total, 1.0)
    assert [rank.code for rank in well] == [0, 0] and [r.result[0] for r in well] == [0, 1]
    assert [rank.code for rank in worlds.fresh(2, hang, 1, timeout=1, limit=4)] == [1, -9]
