"""A loss of several forward passes is one micro-batch, also where they run ahead of backward.

test_scenarios.py holds such losses against torch at every stage.
"""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import many_forwards_jobs
from tests.distributed.many_forwards_jobs import STEPS

# All forward passes of a step come first, then their backward passes.
CASES = [(stage, "sharded", 2, 0.0, "tensor ahead") for stage in (0, 1, 2)]
CASES += [(2, "sharded", 2, 0.1, "engine ahead")]
CASES += [(stage, "fused", 1, 0.1 * (stage % 2), "engine") for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("case", params([(case,) for case in CASES], [(c,) for c in CASES[2:6]]))
def test_a_loss_of_several_forward_passes_is_one_micro_batch(case):
    _, _, accumulation, max_norm, _ = case
    for got in worlds.run(2, many_forwards_jobs.train, *case):
        boundaries, lrs, *_ = zip(*got["told"], strict=True)
        assert [*boundaries] == ([False] * (accumulation - 1) + [True]) * STEPS
        assert got["told"][-1][2:] == (accumulation * STEPS, STEPS)
        assert len({*lrs}) > 1
        alone = many_forwards_jobs.alone(accumulation, max_norm, lrs[::accumulation])
        assert got["norm"] == pytest.approx(alone.norms[-1], rel=1e-5)
        check_each(got["after"], alone.after, got["before"], STEPS)


@pytest.mark.parametrize("stage, accumulation", [(0, 2), (1, 2), (2, 4), (3, 2)])
def test_steps_and_schedules_are_deepspeeds(stage, accumulation):
    ours, theirs = (
        worlds.run(2, many_forwards_jobs.train, stage, policy, accumulation, 0.0, "engine")
        for policy in ("sharded", "")
    )
    assert ours[0]["told"] == theirs[0]["told"]
