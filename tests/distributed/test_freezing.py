"""Layers that are frozen, unfrozen or added between steps, or run again in backward."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import freezing_jobs
from tests.distributed.freezing_jobs import STEPS

RANKS = (1, 2, 3)
FROZEN = [(stage, policy, 0.1) for stage in (0, 1, 3) for policy in ("fused", "sharded")]
FROZEN.append((2, "fused", 0.0))
FROZEN_ON = [(n, *case) for n in RANKS for case in FROZEN if n < 3 or case[0] in (0, 3)]
QUICK_FROZEN = [
    (2, 1, "fused", 0.1),
    (2, 2, "fused", 0.0),
    (2, 3, "sharded", 0.1),
    (3, 3, "fused", 0.1),
]
WAYS = [("fused", 0.0, "deepspeed"), ("sharded", 0.05, "deepspeed")]
WAYS += [("fused", 0.05, kind) for kind in ("deepspeed", "selective")]
CHECKPOINTED = [(n, stage, *way) for n in RANKS for stage in (1, 3) for way in WAYS]
QUICK_CHECKPOINTED = [
    (2, 1, "fused", 0.0, "deepspeed"),
    (2, 3, "fused", 0.05, "deepspeed"),
    (2, 3, "fused", 0.05, "selective"),
]


@pytest.mark.supports("layers frozen and unfrozen on the way", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage, policy, max_norm", params(FROZEN_ON, QUICK_FROZEN))
def test_layers_may_be_frozen_unfrozen_and_added_between_steps(ranks, stage, policy, max_norm):
    got = worlds.run(ranks, freezing_jobs.frozen, stage, policy, max_norm)[0]
    alone = freezing_jobs.frozen_alone(ranks, max_norm)
    check_each(got["after"], alone.after, alone.before, STEPS)
    assert not any(torch.equal(p, alone.before[n]) for n, p in alone.after.items())


@pytest.mark.supports("`deepspeed.checkpointing`", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize(
    "ranks, stage, policy, max_norm, kind", params(CHECKPOINTED, QUICK_CHECKPOINTED)
)
def test_checkpointing_that_runs_backward_once_is_exact(ranks, stage, policy, max_norm, kind):
    got = worlds.run(ranks, freezing_jobs.checkpointed, stage, policy, max_norm, kind)[0]
    alone = freezing_jobs.checkpointed_alone(ranks, max_norm)
    check_each(got["after"], alone.after, alone.before, STEPS)
