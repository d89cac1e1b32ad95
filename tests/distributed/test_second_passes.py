"""A second gradient before the step is refused on all ranks, even if the first one still waits."""

import pytest
import torch

from tests import worlds
from tests.common.engines import alone
from tests.common.updates import check_each
from tests.distributed import second_passes_jobs
from tests.distributed.second_passes_jobs import LR, Case

AGAIN = (("trunk", "trunk"),) * 2
REFUSED = {
    "whole": Case(AGAIN),
    "small-buckets": Case(AGAIN, bucket=40),
    "ahead": Case(AGAIN, bucket=40, ahead=True),
    "ahead-whole": Case(AGAIN, ahead=True),
    "another-between": Case((("trunk", "side", "trunk"),) * 2),
    "partial-gradients": Case((("segments", "segments"),) * 2),
    "on-one-rank": Case((("expert0", "expert0"), ("expert1", "expert2"))),
    "in-one-process": Case(AGAIN[:1], bucket=10**6),
    "parts-in-one-process": Case((("segments", "segments"),), bucket=1),
    "fsdp2": Case(AGAIN, is_cut=True),
}
ALLOWED = {
    "towers": Case((("trunk", "side"),) * 2),
    "towers-ahead": Case((("trunk", "side"),) * 2, bucket=40, ahead=True),
    "segments": Case((("segments", "side"),) * 2),
    "experts": Case((("expert0", "expert1"), ("expert1", "expert2"))),
    "pass-on-one-rank": Case((("trunk", "side"), ("trunk",))),
    "discarded": Case((("trunk", "zero", "trunk"),) * 2),
    "sharded": Case(AGAIN, "sharded"),
    "fsdp2": Case((("trunk", "side"),) * 2, is_cut=True),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_second_gradient_is_refused_on_all_ranks(case):
    errors = [error for error, _ in worlds.run(len(case.passes), second_passes_jobs.train, case)]
    assert len(set(errors)) == 1
    name = "experts.0.weight" if case.passes[0][0] == "expert0" else ("first", "last")
    assert errors[0].startswith(name)
    assert "got a second gradient" in errors[0] and "before optimizer.step()" in errors[0]


def test_a_loop_without_steps_is_refused_at_its_second_pass():
    for error, number in worlds.run(2, second_passes_jobs.train_without_steps):
        assert "got a second gradient" in error and number == 1


@pytest.mark.parametrize("case", ALLOWED.values(), ids=ALLOWED)
def test_passes_that_bring_each_gradient_once_are_one_step(case):
    model = second_passes_jobs.make()

    def loss_of(model, number, rank):
        return second_passes_jobs.counted_loss(model, rank, case.passes[rank])

    expected = alone(model, torch.optim.SGD(model.parameters(), lr=LR), loss_of, steps=1)
    for error, after in worlds.run(2, second_passes_jobs.train, case):
        assert not error
        check_each(after, expected.after, expected.before)
