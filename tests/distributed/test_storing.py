"""Saves: unusual dtypes, tags that differ, functions that fail, Ctrl-C."""

import pytest

from tests import worlds
from tests.distributed import storing_jobs


def test_parameters_and_buffers_of_any_dtype_are_sent_without_an_engine():
    first, second = worlds.run(2, storing_jobs.plain_dtypes)
    assert first == second == storing_jobs.bits(storing_jobs.Quantized(seed=0).state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_weights_of_any_dtype_are_loaded(tmp_path, stage):
    for saved, loaded in worlds.run(2, storing_jobs.loaded_dtypes, stage, str(tmp_path)):
        assert saved == loaded
    assert (tmp_path / "latest").read_text() == "0"  # the tag that was given


@pytest.mark.parametrize("mode", ["Ignore", "Warn", "Fail"])
def test_tags_that_differ_by_rank_are_taken_as_tag_validation_says(tmp_path, mode):
    told = "the ranks give different tags"
    for rank, found in enumerate(worlds.run(2, storing_jobs.own_tags, str(tmp_path), mode)):
        errors, said, entries, weight = found
        assert all((told in error) == (mode == "Fail") for error in errors)
        assert (told in said) == (mode == "Warn" and rank == 0)
        if mode == "Fail":
            assert entries == [] and weight == 3
        else:
            assert "tag0" in entries and "tag1" not in entries and weight == 2


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_each_function_of_a_save_or_load_that_fails_on_one_rank_fails_on_all(tmp_path, stage):
    job = storing_jobs.failing_engine
    for number, wrong in worlds.run(2, job, str(tmp_path), stage, limit=300):
        assert number > 100 and wrong == []


def test_after_ctrl_c_in_a_save_one_goes_on(tmp_path):
    calls, wrong = worlds.run(1, storing_jobs.interrupted, str(tmp_path / "run"))[0]
    assert calls > 20 and not wrong, wrong
