"""ZeRO among groups of ranks that hold copies: exact, and the same bits in all of them."""

from collections import Counter

import pytest

from tests import worlds
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.common.states import same
from tests.common.updates import check
from tests.distributed import shard_size_jobs, training_jobs
from tests.distributed.shard_size_jobs import RUNS

ALL = [(4, name) for name in RUNS] + [(2, name) for name in RUNS if RUNS[name][0] == 1]
ALL.append((3, "adalomo-alone"))
QUICK = {(4, "adalomo"), (4, "came-clip"), (2, "adalomo-alone")}


def shown(name: str) -> str | list[str]:
    return "groups of ranks with copies (`shard_size`)" if RUNS[name][0] else []


@pytest.mark.supports(
    shown, stage=lambda name: RUNS[name][1].stage, optimizer=lambda name: RUNS[name][1].rule
)
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_copies_equal_one_process_with_the_global_batch(ranks, name):
    _, run = RUNS[name]
    found = worlds.once(ranks, shard_size_jobs.train, name)
    reference = training_jobs.Reference(run, found[0]["told"])
    expected, before = reference.train(ranks), reference.before
    for got in found:
        assert same(got["before"], before)
        check(got["after"], expected, before, training_jobs.STEPS, CLOSE.get(run.rule, 1e-5))
        assert got["norms"] == pytest.approx(reference.norms, rel=1e-4)
        assert got["identical"]


@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_sums_stay_in_a_group_and_gradients_cross_once_a_bucket(ranks, name):
    size, run = RUNS[name]
    size = size or ranks
    numel = [p.numel() for p in training_jobs.models.make(dropout=0.3).parameters()]
    for got in worlds.once(ranks, shard_size_jobs.train, name):
        assert got["shards"] == {size}
        parts = [-(-n // size) if run.stage == 3 else n for n in numel]
        assert got["held"] == sum(parts)
        calls = Counter(got["calls"])
        scattered, summed = shard_size_jobs.Sent.METHODS
        cut, across = calls[scattered, size], calls[summed, ranks // size]
        assert bool(cut) == (size > 1) and bool(across) == (size < ranks)
        assert not (cut and across) or cut == across
        among = {n for kind, n in calls if kind == "sum"}
        assert among <= {size, ranks}
        if size > 1 and run.rule != "adamw":  # which sums nothing but the norm
            assert calls["sum", size] > len(numel) / 8


@pytest.mark.parametrize("stage", params([3, 1], [3]))
def test_noise_and_gradients_that_are_not_finite_are_alike_in_all_copies(stage):
    for got in worlds.once(4, shard_size_jobs.rounded, stage):
        assert all(got["same"]) and got["skipped"] == [False, False, True, False]
        assert got["told"] == 1 and got["moved"] > 8


SAVED = [("came", 3, ((3, 4), (3, 1), (1, 2))), ("galore", 1, ((3, 2), (2, 4)))]


@pytest.mark.parametrize("case", params([(case,) for case in SAVED], []), ids=str)
def test_a_checkpoint_is_gone_on_from_in_other_groups(case):
    kind, stage, further = case
    for got in worlds.once(4, shard_size_jobs.saved, kind, stage, list(further)):
        assert got["same"] and got["zero_to_fp32"]
        assert got["files"] == ([2, 2] if stage == 3 else [1, 2])  # of one copy
        for loaded, off, alike in got["found"]:
            assert loaded and alike and off <= 1e-5


def test_models_that_are_cut_while_they_are_built_are_the_same_in_all_copies():
    for got in worlds.once(4, shard_size_jobs.built):
        assert got["same"] and got["after"]
        assert "ds_ext.shard_size = 4" in got["told"] and "config_dict_or_path" in got["told"]


@pytest.mark.parametrize("frozen", [0, 2])
def test_secondary_copies_and_a_frozen_persistent_parameter_go_together(frozen):
    for losses in worlds.once(4, shard_size_jobs.secondary_copies, frozen):
        assert losses[2][1] < losses[0][1] - 0.01
        assert all(ours == pytest.approx(expected, rel=1e-5) for ours, expected in losses)
