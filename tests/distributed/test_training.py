"""Clipping and accumulation on real ranks, by policy and stage, against one process."""

import re

import pytest

from tests import worlds
from tests.common.by_role import MATRICES
from tests.common.choose import pairs, params
from tests.common.hypers import CLOSE
from tests.common.states import same
from tests.common.updates import check, check_each
from tests.distributed import training_jobs, unused_parameters_jobs
from tests.distributed.training_jobs import RUNS, STEPS
from tests.tools.support import of

ON_THREE = re.compile(
    r"^(clip-stage[03]-(fused|sharded)-(none|reentrant)|accumulation2-stage[23]-clip)"
    r"|^(value|previous|unmanaged|no_sync|galore)|^muon-(fused|accumulation2-clip)-"
)
ROUTED_ON_THREE = re.compile(r"-(60|reentrant|clip|muon)$")


def on_ranks(runs, others):
    """The runs on two ranks, and ``others`` of them on one and three."""
    return [
        (n, name)
        for n in (1, 2, 3)
        for name, run in runs.items()
        if (n == 2 or others.search(name)) and (n > 1 or run.rule not in MATRICES)
    ]


# What `make test` runs: each way to clip and to accumulate, each stage and kind of checkpointing.
QUICK = {
    *((2, f"clip-{at}") for at in ("stage0-fused-reentrant", "stage2-sharded-nonreentrant")),
    *((2, f"clip-stage3-{at}") for at in ("fused-deepspeed", "sharded-reentrant")),
    *((2, name) for name in ("value-stage3-sharded", "previous-stage3", "clip-plain-fused-none")),
    *((2, f"accumulation{n}-clip") for n in ("3-stage2", "2-plain")),
    *((2, name) for name in ("boundary-1", "muon-accumulation2-clip-1")),
}
QUICK_ROUTED = {(2, name) for name in ("plain-60", "stage1-reentrant", "stage3-clip-sharded")}


def shown(name: str) -> str | list[str]:
    """The feature that a run shows; runs of one micro-batch and no clipping show none."""
    how = RUNS[name]
    if how.checkpointing == "deepspeed":
        return "`deepspeed.checkpointing`"
    if how.accumulation > 1:
        return "gradient accumulation" + (" with clipping" if how.max_norm else "")
    if how.clip_value:
        return "clipping by value"
    if how.clip_mode == "previous":
        return "clipping by the previous step's norm"
    policy = "sharded" if how.policy == "sharded" else "fused"
    return f'clipping by norm, `"{policy}"`' if how.max_norm else []


ALL = pairs(
    on_ranks(RUNS, ON_THREE),
    lambda case: (case[0], *RUNS[case[1]].settings, str(shown(case[1]))),
    QUICK,
)
ROUTED = pairs(
    on_ranks(unused_parameters_jobs.RUNS, ROUTED_ON_THREE),
    lambda case: (case[0], *unused_parameters_jobs.RUNS[case[1]].settings),
    QUICK_ROUTED,
)


@pytest.mark.supports(shown, **of(RUNS))
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_equals_one_process_with_the_global_batch(ranks, name):
    how = RUNS[name]
    got = worlds.once(ranks, training_jobs.train, how)[0]
    before, expected, norms = training_jobs.alone(how, ranks, got["told"])
    assert same(got["before"], before)
    check(got["after"], expected, before, STEPS, CLOSE.get(how.rule, 1e-5))
    assert got["norms"] == pytest.approx(norms, rel=1e-4)
    if how.max_norm:
        assert max(norms) > 1.5 * how.max_norm  # or it would show nothing
    if how.clip_value:
        assert 0.01 < got["metrics"]["clipped_fraction"] < 1


@pytest.mark.supports("parameters used by only some ranks", **of(unused_parameters_jobs.RUNS))
@pytest.mark.parametrize("ranks, name", params(ROUTED, QUICK_ROUTED))
def test_ranks_that_use_different_parameters_neither_hang_nor_drift(ranks, name):
    how = unused_parameters_jobs.RUNS[name]
    got = worlds.once(ranks, unused_parameters_jobs.train, how)[0]
    alone, steps = unused_parameters_jobs.reference(how, ranks, got["told"])
    assert got["identical"]
    assert got["steps"] == steps
    close = CLOSE.get(how.rule, 1e-5)
    check_each(got["after"], alone.after, alone.before, unused_parameters_jobs.STEPS, close)
