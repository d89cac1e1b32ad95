"""Weights that backward reads again after their step, or that are edited after each step."""

import pytest
import torch

from tests import worlds
from tests.common.updates import check_each, error
from tests.distributed import reread_weights_jobs
from tests.tools.old_checkpoints import Whole


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


STEPS = 40


@pytest.mark.parametrize("way", ["fused", "FSDP2", 0, 1, 2, 3])
def test_edits_do_not_stop_the_progress_of_small_steps(way):
    """Each step is less than half the spacing of bf16 numbers; without residuals all are lost."""
    ranks = 1 if way == "fused" else 2
    before = {n: p.detach() for n, p in Whole().named_parameters()}
    expected, *_ = worlds.run(ranks, reread_weights_jobs.edited, way, torch.float32, STEPS)
    for found in worlds.run(ranks, reread_weights_jobs.edited, way, torch.bfloat16, STEPS):
        free = {n: w.abs() < 0.4 for n, w in expected.items()}
        parts = [{n: w.float()[free[n]] for n, w in x.items()} for x in (found, expected, before)]
        assert error(*parts) <= 0.1
        assert all((w.float() - expected[n]).abs().max() < 2e-3 for n, w in found.items())
