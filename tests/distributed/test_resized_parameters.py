"""Parameters that are given data of another shape are refused on every rank, and nothing moves."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import resized_parameters_jobs

CASES = [(stage, policy) for stage in (0, 1, 2, 3) for policy in ("fused", "sharded")]

AUTOEP = [(stage, where) for stage in (0, 1, 2) for where in ("experts", "embed_tokens")]


@pytest.mark.parametrize("stage, policy", params(CASES, [(1, "fused"), (3, "fused")]))
def test_an_engine_refuses_them_in_backward(stage, policy):
    for found in worlds.run(2, resized_parameters_jobs.in_engine, stage, policy):
        assert "embed.weight has the shape [16, 6] now" in found["told"]
        assert found["same"] == {"embed.weight": stage == 3, "head.weight": True, "head.bias": True}


@pytest.mark.parametrize("fused", [True, False])
def test_states_of_dtensors_are_checked(fused):
    for found in worlds.run(2, resized_parameters_jobs.in_fsdp2, fused):
        assert "ValueError: not a state of AdaLomo for these parameters" in found["told"]
        assert "does not fit it: v.row has the shape [1, 3]" in found["edited"]


def test_a_stage_of_a_pipeline_refuses_them_and_the_other_ends_with_it():
    first, second = worlds.fresh(2, resized_parameters_jobs.in_pipeline)
    assert "0.weight has the shape [8, 6] now" in first.output
    for ended in (first, second):
        assert ended.code == 1 and "as it was" in ended.output
        assert ended.seconds < 60


@pytest.mark.parametrize("stage, where", params(AUTOEP, [(1, "experts")]))
def test_experts_that_autoep_divides_refuse_them(stage, where):
    for found in worlds.run(2, resized_parameters_jobs.in_autoep, stage, where):
        assert f"{found['name']} has the shape" in found["told"]
        assert found["moved"] == [found["name"]]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_with_experts_refuses_them(stage):
    for found in worlds.run(2, resized_parameters_jobs.in_experts, stage):
        assert "embed.weight has the shape [16, 6] now" in found["told"]
        assert found["moved"] == ["embed.weight"]
