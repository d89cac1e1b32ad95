"""A checkpoint does not depend on whether, and where, the model was compiled."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import compiled_checkpoints_jobs as jobs

WAYS = [("plain", "model"), ("model", "submodules"), ("submodules", "both"), ("both", "engine")]


CASES = [(ways, stage) for ways in WAYS for stage in (0, 2)]


@pytest.mark.parametrize("ways, stage", params(CASES, []))
def test_compiled_in_one_way_and_loaded_in_another(tmp_path, ways, stage):
    assert worlds.run(2, jobs.carried_over, ways, stage, str(tmp_path)) == [(True, True)] * 2


@pytest.mark.slow
def test_compiled_and_partitioned(tmp_path):
    ways = ("plain", "engine")
    assert worlds.run(2, jobs.carried_over, ways, 3, str(tmp_path)) == [(True, True)] * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_of_a_compiled_model_that_adamw_trained(tmp_path, stage):
    ways = ("model", "plain")
    assert worlds.run(2, jobs.adamw_carried_over, ways, stage, str(tmp_path)) == [True] * 2
