"""A loss of several forward passes is one micro-batch: gradients, steps and schedules."""

import itertools

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import many_forwards_jobs as job

WORLD = 2
WAYS = (("fused", 1), ("sharded", 1), ("sharded", 2), ("sharded", 4))
NAMES = itertools.cycle(("siamese", "r_drop", "dpo"))
CASES = [
    (stage, *way, 0.1 * clip, next(NAMES), how)
    for how, clip, way, stage in itertools.product(
        ("engine", "tensor"), (False, True), WAYS, (0, 1, 2, 3)
    )
    # What is measured first needs to know of the loss: engine.backward(loss).
    if not (how == "tensor" and clip and way[0] == "fused")
]
# All forward passes of a step come first, then their backward passes.
CASES += [(stage, "sharded", 2, 0.0, "one", "tensor ahead") for stage in (0, 1, 2)]
CASES += [(2, "sharded", 2, 0.1, "siamese", "engine ahead")]
QUICK = CASES[::9] + CASES[-4:]
NAMED = "stage, policy, accumulation, max_norm, name, how"


@pytest.mark.parametrize(NAMED, params(CASES, QUICK))
def test_a_loss_of_several_forward_passes_is_one_micro_batch(
    stage, policy, accumulation, max_norm, name, how
):
    results = worlds.run(WORLD, job.engines, stage, policy, accumulation, max_norm, name, how)
    for got in results:
        boundaries, lrs, *_ = zip(*got["told"], strict=True)
        assert [*boundaries] == ([False] * (accumulation - 1) + [True]) * job.STEPS
        assert got["told"][-1][2:] == (accumulation * job.STEPS, job.STEPS)
        assert len({*lrs}) > 1
        weights, norm = job.reference(WORLD, accumulation, max_norm, name, lrs[::accumulation])
        assert abs(got["norm"] - norm) <= 1e-5 * norm
        for p, q, start in zip(weights, got["after"], got["before"], strict=True):
            assert (p - start).norm() > 0
            assert (p - q).norm() <= 1e-5 * (p - start).norm() + 2**-22 * p.norm()


@pytest.mark.parametrize("stage, accumulation", [(0, 2), (1, 2), (2, 4), (3, 2)])
def test_steps_and_schedules_are_deepspeeds(stage, accumulation):
    ours, theirs = (
        worlds.run(WORLD, job.engines, stage, policy, accumulation, 0.0, "siamese", "engine")
        for policy in ("sharded", "")
    )
    assert ours[0]["told"] == theirs[0]["told"]
