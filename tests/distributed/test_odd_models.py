"""Engines: sparse embeddings, channels_last, gradients from before, layers unfrozen later."""

import pytest
import torch

from tests import worlds
from tests.common.updates import check_each
from tests.distributed import odd_models_jobs

WORLD = 2
CASES = [(stage, 0.0, "fused") for stage in range(4)]
CASES += [(1, 0.05, "fused"), (3, 0.05, "fused"), (2, 0.05, "sharded"), (3, 0.05, "sharded")]


@pytest.mark.parametrize("stage, max_norm, policy", CASES)
def test_odd_models_are_trained_as_in_one_process(stage, max_norm, policy):
    extra = {"gradient_clipping": max_norm, "ds_ext": {"gradient_policy": policy}}
    expected = odd_models_jobs.reference(WORLD, max_norm)
    for got in worlds.run(WORLD, odd_models_jobs.train, stage, extra):
        check_each(got["after"], expected, got["before"])
        assert not any(torch.equal(p, got["before"][n]) for n, p in expected.items())


def test_an_engine_refuses_a_model_in_ddp():
    for told in worlds.run(WORLD, odd_models_jobs.wrapped):
        assert "wrapped by DistributedDataParallel: pass the model itself" in told


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_without_effect_are_accepted_and_told_of(stage):
    first, second = worlds.run(WORLD, odd_models_jobs.without_effect, stage)
    assert first[0] and second[0]
    for key in odd_models_jobs.UNREAD[stage]:
        (line,) = [line for line in first[1] if key in line]
        assert "has no effect" in line or "have no effect" in line
    assert second[1] == []  # the first rank tells


def test_a_leaf_module_without_inputs_that_need_gradients_is_refused():
    for told, stayed, moved in worlds.run(WORLD, odd_models_jobs.leaf_inputs):
        assert "First is a leaf module of ZeRO-3" in told and "unset_z3_leaf_modules" in told
        assert stayed and moved
