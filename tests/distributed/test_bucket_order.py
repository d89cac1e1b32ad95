"""Buckets come in the same order on every rank; ranks that differ are told so and do not hang."""

import functools

import pytest
import transformers

from tests import worlds
from tests.common import engines
from tests.common.updates import check_each
from tests.distributed import bucket_order_jobs
from tests.distributed.bucket_order_jobs import CASES, FROM, STEPS, TIMEOUT, WAITING

EXACT = [case for case in CASES if case[1] != 3 or not case[0]]
TOLD = [case for case in CASES if case not in EXACT and case != WAITING]


@pytest.mark.supports(
    lambda case: "parameters used by only some ranks" if case[0] else [],
    stage=lambda case: case[1],
    optimizer="AdaLomo",
)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_any_order_is_exact_below_stage_3_and_one_order_at_it(case):
    model = bucket_order_jobs.make()
    optimizer = transformers.Adafactor(model.parameters(), lr=0.01, relative_step=False)
    loss_of = functools.partial(bucket_order_jobs.loss_of, way=case[0])
    alone = engines.alone(model, optimizer, loss_of, STEPS)
    for got in worlds.once(2, bucket_order_jobs.train, *CASES[case]):
        assert got["error"] == ""
        check_each(got["after"], alone.after, alone.before, STEPS)


NEXT = {
    ("swapped", 0): "the forward pass of a on rank 0, and the forward pass of b on rank 1",
    ("less", 0): "the forward pass of up on rank 0, and the backward pass of the model on rank 1",
    ("either", FROM): "the gradient of b.weight on rank 0, and the gradient of a.weight on rank 1",
    ("less", FROM): "the gradient of down.weight on rank 0, and the gradient of b.weight on rank 1",
    ("frozen", FROM): (
        "the gradient of down.weight on rank 0, and the gradient of up.weight on rank 1"
    ),
}


@pytest.mark.parametrize("case", TOLD, ids=str)
def test_ranks_that_differ_at_stage_3_are_all_told_so_at_once(case):
    way, _, since = case
    for rank in worlds.fresh(2, bucket_order_jobs.train, *CASES[case], timeout=60):
        assert rank.code == 0, rank.output
        got = rank.result
        assert f"next is {NEXT[way, since]}" in got["error"], got["error"]
        assert "zero_optimization.stage 3" in got["error"]
        assert got["step"] == since and got["seconds"] < 10


def test_ranks_that_wait_for_other_weights_end_at_the_time_limit():
    for rank in worlds.fresh(2, bucket_order_jobs.train, *CASES[WAITING], timeout=TIMEOUT):
        assert rank.result, rank.output
        assert rank.result["error"].startswith("LostRankError"), rank.result["error"]
        assert rank.result["step"] == FROM and rank.result["seconds"] < TIMEOUT + 10
