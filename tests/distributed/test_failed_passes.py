"""Ranks whose backward passes fail at different layers get one error; alike ones leave no trace."""

import pytest
import torch

from ds_ext.distributed.consensus import DIFFERENT_PASSES
from tests import worlds
from tests.common.engines import alone
from tests.common.updates import check_each
from tests.distributed import failed_passes_jobs
from tests.distributed.failed_passes_jobs import LR, NO_BATCH, WELL, Case

FAILED = [
    Case(1, (1, 3)),
    Case(2, (0, 2)),
    Case(0, (1, WELL), "sharded"),
    Case(1, (2, 0), clip=1.0),
    Case(1, (WELL, 0), clip=1.0),
    Case(1, (1, 3), "sharded", zero_grad=False),
    Case(3, (1, 3)),
    Case(3, (2, 0), zero_grad=False),
    Case(3, (WELL, 1), clip=1.0),
    Case(None, (1, 3)),
    Case(None, (2, 1), zero_grad=False),
    Case(None, (1, 3), clip=1.0),
    Case(None, (1, 2), ahead=True),
    Case(None, (2, 3), ahead=True),
    Case(None, (2, WELL), "sharded", ahead=True),
    Case(1, (1, 3, 2)),
]
WITHOUT_BATCH = [
    Case(1, (NO_BATCH, WELL)),
    Case(2, (NO_BATCH, WELL), clip=1.0),
    Case(0, (WELL, NO_BATCH), "sharded"),
    Case(None, (NO_BATCH, WELL), clip=1.0),
    Case(1, (NO_BATCH, WELL), reads_norm=True),
    Case(None, (NO_BATCH, WELL), reads_norm=True),
]
ALIKE = [
    Case(1, (2, 2), "sharded"),
    Case(2, (2, 2), clip=1.0),
    Case(None, (3, 3), "sharded", ahead=True),
    Case(3, (2, 2), "sharded"),
    Case(None, (2, 2), "sharded"),
]


def name(case):
    """The stage and the ends of a case, and what else it sets."""
    more = ["clipped"] * bool(case.clip) + ["goes_on"] * (not case.zero_grad)
    more += ["reads_norm"] * case.reads_norm + ["ahead"] * case.ahead
    return "-".join([f"stage{case.stage}", *map(str, case.ends), case.policy, *more])


@pytest.mark.parametrize("case", FAILED + WITHOUT_BATCH, ids=name)
def test_ranks_in_different_passes_all_raise_the_same_error(case):
    for errors, _ in worlds.run(len(case.ends), failed_passes_jobs.train, case, limit=20):
        *failures, (_, last) = errors
        assert last == DIFFERENT_PASSES
        assert failures in ([], [(1, "Failure")])


@pytest.mark.parametrize("case", ALIKE, ids=name)
def test_a_pass_that_fails_at_the_same_layer_of_all_ranks_leaves_no_trace(case):
    model, _ = failed_passes_jobs.make()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    expected = alone(model, sgd, _without_second, steps=2, max_norm=case.clip)
    for errors, after in worlds.run(2, failed_passes_jobs.train, case):
        assert errors == [(1, "Failure")]
        check_each(after, expected.after, expected.before)


@pytest.mark.parametrize(
    "how, first, last",
    [
        ("empty batch", [], []),
        ("before a gradient", ["Failure"], ["Failure"]),
        ("probe", ["RuntimeError"], []),
    ],
)
def test_what_asks_other_ranks_nothing_is_no_error(how, first, last):
    assert worlds.run(2, failed_passes_jobs.legal, how, limit=20) == [first, last]


def _without_second(model, number, rank):
    return failed_passes_jobs.loss_of(model, 2 * number, rank)
