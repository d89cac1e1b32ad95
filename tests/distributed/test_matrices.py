"""APOLLO and Muon on real ranks against their authors' code in one process, and resumed."""

import pytest

from ds_ext.rules.base import key_of
from tests import worlds
from tests.common import by_role, hypers, models
from tests.common.choose import params
from tests.common.plain import mean_step
from tests.common.updates import check, error
from tests.distributed import matrices_jobs
from tests.distributed.matrices_jobs import STEPS, TYPES

STAGES = (None, 0, 1, 2, 3)
CASES = [(n, ranks, at, "as it is") for n in TYPES for ranks in (2, 3) for at in STAGES]
QUICK = {("APOLLO", 2, 3), ("APOLLO-Mini", 3, 1), ("ds_ext.Muon", 2, 2), ("ds_ext.Muon", 2, None)}
QUICK = {(*case, "as it is") for case in QUICK}
# zero.Init and checkpointing at all stages that they change.
CASES += [(n, 2, 3, how) for n in TYPES for how in ("zero.Init", "nonreentrant")]
CASES += [(n, 2, at, "reentrant") for n in TYPES for at in range(4)]
CASES += [("ds_ext.Muon", 3, 3, how) for how in ("zero.Init", "reentrant")]
QUICK |= {("ds_ext.Muon", 2, 3, "zero.Init"), ("ds_ext.Muon", 2, 1, "reentrant")}
CLOSE = {name: hypers.CLOSE.get(key_of(name), 1e-5) for name in TYPES}
STEPPED = {"up.weight", "down.weight", "shared.weight", "odd.weight"}
LINEAR = STEPPED | {"unused.weight", "frozen.weight"}


def train_by_authors(name, got, model, ranks, steps):
    """Trains a whole model by the mean loss over all ranks, with the groups that ``got`` tells."""
    optimizer = by_role.as_told(key_of(name), TYPES[name], got, dict(model.named_parameters()))
    for step in range(steps):
        mean_step(optimizer, [model(batch, step) for batch in models.batch(step, ranks)])


def shown(stage, how):
    """The features that a case shows."""
    if how != "as it is":
        special = "models built under `zero.Init`" if how == "zero.Init" else None
        return [special or f"{how.replace('nonre', 'non-re')} activation checkpointing"]
    decays = [] if stage is None else ["weight decay by the JSON config"]
    usual = ["fp32, each optimizer against its authors' code"]
    return [*usual, "tied, shared, unused weights; 0 to 4 dimensions", *decays]


@pytest.mark.supports(shown, stage="stage", optimizer=lambda name: key_of(name))
@pytest.mark.parametrize("name, ranks, stage, how", params(CASES, QUICK))
def test_equals_the_authors(name, ranks, stage, how):
    got = worlds.run(ranks, matrices_jobs.train, name, stage, how)[0]
    assert got["identical"]
    # An engine has groups of frozen parameters too, which may be unfrozen.
    linear = LINEAR - {"frozen.weight"} if stage is None else LINEAR
    assert {n for n, (kind, *_) in got["groups"].items() if kind is None} == linear
    assert {kind for kind, *_ in got["groups"].values()} == {None, "AdamW"}
    if "APOLLO" in name:
        assert got["streams"].keys() == STEPPED and len(set(got["streams"].values())) == 4
    model = models.make()
    train_by_authors(name, got, model, ranks, STEPS)
    check(got["after"], dict(model.named_parameters()), got["before"], STEPS, CLOSE[name])


ELSEWHERE = [(name, stage) for name in TYPES for stage in range(4)]


@pytest.mark.supports(
    "resume on other ranks and another stage", stage="stage", optimizer=lambda name: key_of(name)
)
@pytest.mark.parametrize("name, stage", params(ELSEWHERE, [("APOLLO", 2)]))
def test_a_run_goes_on_on_other_ranks_and_another_stage(name, stage, tmp_path):
    """2 -> 3 -> 1 ranks, against 2 that are not broken off; a projection is kept across both."""
    one, two = str(tmp_path / "whole"), str(tmp_path / "broken")
    whole = worlds.run(2, matrices_jobs.resume, name, stage, one, 0, 6)[0]
    worlds.run(2, matrices_jobs.resume, name, stage, two, 0, 2)
    worlds.run(3, matrices_jobs.resume, name, (stage + 1) % 4, two, 2, 5)
    (last,) = worlds.run(1, matrices_jobs.resume, name, (stage + 3) % 4, two, 5, 6)
    assert error(last["after"], whole["after"], whole["before"]) <= CLOSE[name] / 10


HALVES = [(name, stage) for name in TYPES for stage in range(4)]


@pytest.mark.supports("bf16 weights", stage="stage", optimizer=lambda name: key_of(name))
@pytest.mark.parametrize("name, stage", params(HALVES, [("ds_ext.Muon", 1)]))
def test_bf16_weights_are_clipped_and_accumulated_as_in_fp32(name, stage):
    """With 24 bits, and rounded at random; as at stage 0, where no rank has a part."""
    exact = worlds.once(2, matrices_jobs.accumulate, name, 0, None)[0]
    for weight_update in ("master24", "stochastic"):
        alone, got = (
            worlds.once(2, matrices_jobs.accumulate, name, at, weight_update)[0]
            for at in (0, stage)
        )
        assert got["identical"]
        assert error(got["after"], alone["after"], alone["before"]) <= 0.05
        assert error(got["after"], exact["after"], exact["before"]) <= 0.3
