"""A pipeline follows edits of param groups, and saves them."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import edited_pipelines_jobs


@pytest.mark.parametrize("world, zero", params([(2, 0), (2, 1), (4, 1)], [(2, 1)]))
def test_edits_of_groups_are_followed_by_a_pipeline_and_saved(world, zero):
    ranks = worlds.run(world, edited_pipelines_jobs.piped, zero)
    reference = edited_pipelines_jobs.piped_alone(
        {n: p for rank in ranks for n, p in rank["before"].items()}
    )
    for rank in ranks:
        assert reference.error(rank["weights"][-1]) <= 1e-5
        assert rank["same"]
