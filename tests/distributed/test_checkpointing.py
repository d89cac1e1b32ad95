"""Segments that are run again in backward: DeepSpeed's own checkpointing, torch's selective one."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import checkpointing_jobs
from tests.distributed.checkpointing_jobs import STEPS

WAYS = [("fused", 0.0, "deepspeed"), ("sharded", 0.05, "deepspeed")]
WAYS += [("fused", 0.05, kind) for kind in ("deepspeed", "selective")]
CHECKPOINTED = [(n, stage, *way) for n in (1, 2, 3) for stage in (1, 3) for way in WAYS]
QUICK_CHECKPOINTED = [(2, 1, "fused", 0.0, "deepspeed"), (2, 3, "fused", 0.05, "deepspeed")]
QUICK_CHECKPOINTED += [(2, 3, "fused", 0.05, "selective")]


@pytest.mark.supports("`deepspeed.checkpointing`", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize(
    "ranks, stage, policy, max_norm, kind", params(CHECKPOINTED, QUICK_CHECKPOINTED)
)
def test_checkpointing_that_runs_backward_once_is_exact(ranks, stage, policy, max_norm, kind):
    got = worlds.run(ranks, checkpointing_jobs.checkpointed, stage, policy, max_norm, kind)[0]
    alone = checkpointing_jobs.checkpointed_alone(ranks, max_norm)
    check_each(got["after"], alone.after, alone.before, STEPS)
