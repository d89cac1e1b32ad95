"""Weights with masters that are edited after each step, on real ranks."""

import pytest
import torch

from tests import worlds
from tests.common.updates import error
from tests.distributed import edited_weights_jobs
from tests.tools.old_checkpoints import Whole

STEPS = 40


@pytest.mark.parametrize("way", ["fused", "FSDP2", 0, 1, 2, 3])
def test_edits_do_not_stop_the_progress_of_small_steps(way):
    """Each step is less than half the spacing of bf16 numbers; without residuals all are lost."""
    ranks = 1 if way == "fused" else 2
    before = {n: p.detach() for n, p in Whole().named_parameters()}
    expected, *_ = worlds.run(ranks, edited_weights_jobs.edited, way, torch.float32, STEPS)
    for found in worlds.run(ranks, edited_weights_jobs.edited, way, torch.bfloat16, STEPS):
        free = {n: w.abs() < 0.4 for n, w in expected.items()}
        parts = [{n: w.float()[free[n]] for n, w in x.items()} for x in (found, expected, before)]
        assert error(*parts) <= 0.1
        assert all((w.float() - expected[n]).abs().max() < 2e-3 for n, w in found.items())
