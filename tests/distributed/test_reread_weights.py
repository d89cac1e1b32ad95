"""Weights that the backward pass reads again after their step are right, or an error says so."""

import pytest
import torch

from tests import worlds
from tests.common.plain import mean_step
from tests.common.updates import check_each
from tests.distributed import reread_weights_jobs


@pytest.mark.parametrize("world, stage", [(1, 0), (1, 3), (2, 0), (2, 2), (2, 3)])
def test_a_weight_read_again_is_the_old_one_or_an_error(world, stage):
    found = worlds.run(world, reread_weights_jobs.reread, stage)
    if (world, stage) != (2, 3):  # where it was gathered before, and its shards are stepped
        assert all("modified by an inplace operation" in got["message"] for got in found)
        return
    plain = reread_weights_jobs.make()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    mean_step(sgd, [plain(reread_weights_jobs.data(rank)) for rank in range(world)])
    for got in found:
        check_each(got["after"], dict(plain.named_parameters()), got["before"])


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (1, 1), (0, 2), (2, 2), (3, 1)])
def test_a_gradient_penalty_is_exact_or_refused_before_a_step(stage, accumulation):
    """DeepSpeed's hook of a model's output divides by the number of micro-batches each time."""
    found = worlds.run(2, reread_weights_jobs.penalty, stage, accumulation)
    plain = reread_weights_jobs.penalized()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    mean_step(sgd, [reread_weights_jobs.penalized_loss(plain, rank) for rank in range(2)])
    for got in found:
        if accumulation == 1 and stage < 3:
            check_each(got["after"], dict(plain.named_parameters()), got["before"])
        else:
            assert "create_graph=True" in got["message"]
            assert all(got["after"][n].equal(w) for n, w in got["before"].items())


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_refuse_complex_parameters(stage):
    for message in worlds.run(2, reread_weights_jobs.complex_parameter, stage):
        assert "complex64" in message and "view_as_real" in message
