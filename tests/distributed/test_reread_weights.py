"""Weights that backward reads again after their step."""

import pytest

from tests import worlds
from tests.common.updates import check_each
from tests.distributed import reread_weights_jobs


@pytest.mark.parametrize("world, stage", [(1, 0), (1, 3), (2, 0), (2, 2), (2, 3)])
def test_a_weight_read_again_is_the_old_one_or_an_error(world, stage):
    for got in worlds.run(world, reread_weights_jobs.step, stage, False, 1):
        if (world, stage) == (2, 3):  # where it was gathered before, and its shards are stepped
            check_each(got["after"], reread_weights_jobs.alone(False).after, got["before"])
        else:
            assert "modified by an inplace operation" in got["message"]


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (1, 1), (0, 2), (2, 2), (3, 1)])
def test_a_gradient_penalty_is_exact_or_refused_before_a_step(stage, accumulation):
    """DeepSpeed's hook of a model's output divides by the number of micro-batches each time."""
    for got in worlds.run(2, reread_weights_jobs.step, stage, True, accumulation):
        if accumulation == 1 and stage < 3:
            check_each(got["after"], reread_weights_jobs.alone(True).after, got["before"])
        else:
            assert "create_graph=True" in got["message"]
            assert all(got["after"][n].equal(w) for n, w in got["before"].items())
