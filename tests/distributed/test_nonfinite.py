"""A gradient that is not finite is as if it had not come, on every rank."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import nonfinite_jobs
from tests.distributed.zero_jobs import RULES

POISONED = [(2, rule, stage) for rule in RULES for stage in (1, 3)]
POISONED += [(2, "sinkgd", 2), (2, "lomo", 0), (1, "adalomo", 3)]
POISONED += [(2, rule, 3) for rule in ("muon", "apollo", "apollomini", "scale")]
# By sums of its rows, of its run, and by votes: in a batch, and stepped alone.
QUICK_POISONED = [(2, "adalomo", 3), (2, "sinkgd", 2), (2, "lomo", 0), (2, "galoreadamw", 3)]


@pytest.mark.parametrize("ranks, rule, stage", params(POISONED, QUICK_POISONED))
def test_a_gradient_that_is_not_finite_is_as_if_it_had_not_come(ranks, rule, stage):
    for got in worlds.once(ranks, nonfinite_jobs.not_finite, rule, stage):
        assert got["skipped"] == len(nonfinite_jobs.POISONED) and got["same"]
        skipped = [step in nonfinite_jobs.POISONED for step in range(5)]
        assert got["changed"] == ["other twice" if x else "bad other twice" for x in skipped]
        assert got["steps"] == {"bad": 2, "other": 5, "twice": 5}
