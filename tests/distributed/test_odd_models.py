"""Engines: sparse embeddings, channels_last, layers unfrozen later, resized parameters."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import odd_models_jobs

CASES = [(stage, 0.0, "fused") for stage in range(4)]
CASES += [(1, 0.05, "fused"), (3, 0.05, "fused"), (2, 0.05, "sharded"), (3, 0.05, "sharded")]


@pytest.mark.parametrize("stage, max_norm, policy", CASES)
def test_odd_models_are_trained_as_in_one_process(stage, max_norm, policy):
    alone = odd_models_jobs.alone(max_norm)
    for got in worlds.run(2, odd_models_jobs.train, stage, max_norm, policy):
        check_each(got["after"], alone.after, alone.before)
        assert not any(torch.equal(p, alone.before[n]) for n, p in alone.after.items())


def test_a_leaf_module_without_inputs_that_need_gradients_is_refused():
    for told, stayed, moved in worlds.run(2, odd_models_jobs.leaf_inputs):
        assert "First is a leaf module of ZeRO-3" in told and "unset_z3_leaf_modules" in told
        assert stayed and moved


RESIZED = [(stage, policy) for stage in (0, 1, 2, 3) for policy in ("fused", "sharded")]


@pytest.mark.parametrize("stage, policy", params(RESIZED, [(1, "fused"), (3, "fused")]))
def test_an_engine_refuses_them_in_backward(stage, policy):
    for found in worlds.run(2, odd_models_jobs.in_engine, stage, policy):
        assert "embed.weight has the shape [16, 6] now" in found["told"]
        assert found["moved"] == ([] if stage == 3 else ["embed.weight"])


@pytest.mark.parametrize("fused", [True, False])
def test_states_of_dtensors_are_checked(fused):
    for found in worlds.run(2, odd_models_jobs.in_fsdp2, fused):
        assert "not a state of AdaLomo for these parameters" in found["told"]
        assert "does not fit it: v.row has the shape [1, 3]" in found["edited"]
