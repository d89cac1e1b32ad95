"""Engines on a model that another one steps, copies of models, and engines that are freed."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import engine_owners_jobs

WORLD = 2


def check(got, ours):
    """Compares a job's steps with those of one process."""
    check_each(
        got["after"], engine_owners_jobs.reference(got["before"], WORLD, ours), got["before"]
    )


TAKEN_OVER = [(s, ours, begun) for s in range(4) for ours in (True, False) for begun in (0, 1)]
QUICK = [(0, True, 0), (1, False, 1), (2, True, 1), (3, True, 0), (3, False, 1)]


@pytest.mark.parametrize("stage, ours, begun", params(TAKEN_OVER, QUICK))
def test_the_newer_engine_takes_over_and_the_older_ends(stage, ours, begun):
    results = worlds.run(WORLD, engine_owners_jobs.second_engine, stage, ours, bool(begun))
    assert [got["said"] for got in results] == [1, 0]
    for got in results:
        check(got, ours)
        assert "steps this model now" in got["refused"]
        assert got["unmoved"] and not got["held"]


def test_a_partitioned_model_that_was_scored_in_inference_mode_is_trained():
    for got in worlds.run(WORLD, engine_owners_jobs.scored_before, 3):
        check(got, ours=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_hooks_of_an_undestroyed_engine_with_adamw_are_refused(stage):
    for got in worlds.run(WORLD, engine_owners_jobs.after_adamw, stage):
        assert "call destroy()" in got["refused"] and got["unmoved"]
        check(got, ours=True)


@pytest.mark.parametrize("stage", params(range(4), (0, 3)))
def test_a_step_in_progress_is_not_taken_over(stage):
    for got in worlds.run(WORLD, engine_owners_jobs.unfinished, stage):
        assert "micro-batches" in got["refused"] and "engine.destroy()" in got["refused"]
        assert got["moved"] == [True, True]


@pytest.mark.parametrize("stage", params(range(4), (1, 3)))
def test_a_copy_of_the_module_is_an_ordinary_model(stage):
    for got in worlds.run(WORLD, engine_owners_jobs.copied, stage):
        assert all(got.values()), got


@pytest.mark.parametrize("first, second", [(1, 3), (2, 0)])
def test_the_newer_engine_may_have_another_stage(first, second):
    for got in worlds.run(WORLD, engine_owners_jobs.changed_stage, first, second):
        check(got, ours=True)


@pytest.mark.parametrize("second", range(3))
def test_partitions_of_another_engine_are_refused_below_stage_3(second):
    for got in worlds.run(WORLD, engine_owners_jobs.changed_stage, 3, second):
        assert f"zero_optimization.stage = {second}" in got["refused"]
        assert "set stage 3" in got["refused"]


# At stage 3, DeepSpeed's nodes in a graph that a module keeps hold the module.
CASES = [("dense", 3), *((kind, stage) for kind in ("keeps", "experts") for stage in range(3))]
CASES += [("int8", 1), ("int8", 3)]


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("how", ["nothing", "step", "steps", "destroyed", "failure"])
@pytest.mark.parametrize("kind, stage", CASES)
def test_a_deleted_engine_is_freed(kind, stage, how, max_norm):
    assert worlds.run(2, engine_owners_jobs.left, kind, stage, how, max_norm) == [[], []]


def test_a_parameter_that_outlives_its_engine_says_so():
    for said in worlds.run(2, engine_owners_jobs.outlived):
        assert "no longer exists" in said
