"""Two hosts, whose ranks have the same local ranks, and folders that they do not share."""

import pytest

from tests import worlds
from tests.common import updates
from tests.common.choose import params
from tests.distributed import hosts_jobs, training_jobs
from tests.distributed.hosts_jobs import RUNS


@pytest.mark.supports(
    "several hosts", stage=lambda name: RUNS[name].stage, optimizer=lambda name: RUNS[name].rule
)
@pytest.mark.parametrize("name", params(RUNS, ["stage 3", "stage 1"]))
def test_local_ranks_that_are_not_the_ranks_change_nothing(name):
    got = worlds.once(4, hosts_jobs.train, name)[0]
    before, expected, _ = training_jobs.alone(RUNS[name], 4)
    assert updates.error(got["after"], expected, before) <= 1e-5
    first, *others = got["orders"]
    assert len(first) >= 4 * training_jobs.STEPS and others == [first] * 3


def test_a_folder_that_each_host_has_for_itself_is_refused():
    for saving, loading in worlds.run(4, hosts_jobs.apart):
        assert "the folder must lie on a file system that all ranks share" in saving
        assert "file system that all ranks share" in loading
