"""Engines: sparse embeddings, channels_last, gradients from before, layers unfrozen later."""

import pytest

from tests import worlds
from tests.distributed import odd_jobs

WORLD = 2
CASES = [(stage, 0.0, "fused") for stage in range(4)]
CASES += [(1, 0.05, "fused"), (3, 0.05, "fused"), (2, 0.05, "sharded"), (3, 0.05, "sharded")]


@pytest.mark.parametrize("stage, max_norm, policy", CASES)
def test_odd_models_are_trained_as_in_one_process(stage, max_norm, policy):
    extra = {"gradient_clipping": max_norm, "ds_ext": {"gradient_policy": policy}}
    expected = odd_jobs.reference(WORLD, max_norm)
    for got in worlds.run(WORLD, odd_jobs.train, stage, extra):
        for name, p in expected.items():
            update = (p - got["before"][name]).norm()
            assert (got["after"][name] - p).norm() <= 1e-5 * update, name
            assert update > 0, name


def test_an_engine_refuses_a_model_in_ddp():
    for told in worlds.run(WORLD, odd_jobs.wrapped):
        assert "wrapped by DistributedDataParallel: pass the model itself" in told
