"""What real engines hold against what is planned for them."""

import itertools

import pytest

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory as planner
from tests import worlds
from tests.common.choose import params
from tests.distributed import memory_jobs
from tests.distributed.memory_jobs import DTYPES, REAL_BUCKET
from tests.unit.test_memory import close, shapes_of

RANKS = 2
KINDS = ["adamw", "adalomo", "came", "flashadamw"]  # the first is DeepSpeed's
CASES = list(itertools.product(KINDS, range(4), DTYPES))
QUICK = [("adamw", 2, "bf16"), ("adamw", 3, "bf16"), ("adalomo", 0, "fp32"), ("came", 1, "fp32")]
QUICK += [("flashadamw", 3, "bf16")]


@pytest.mark.parametrize("kind, stage, dtype", params(CASES, QUICK))
def test_deepspeed_holds_what_is_planned(kind, stage, dtype):
    shapes = shapes_of(memory_jobs.network())
    if kind == "adamw":
        planned = planner.adamw(shapes, stage, RANKS, DTYPES[dtype], REAL_BUCKET).total
    else:  # between steps no gradient is alive
        rule = OPTIMIZERS[kind].hypers()
        ours = planner.optimizer_memory(rule, shapes, stage, RANKS, DTYPES[dtype], REAL_BUCKET)
        planned = ours.total - ours.gradients
    assert close(planned, worlds.once(RANKS, memory_jobs.measure, kind, stage, dtype)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_releases_its_frozen_weights(reentrant):
    for gathered, error in worlds.run(RANKS, memory_jobs.frozen_in_backward, reentrant):
        assert gathered == [1] * 12  # that of the block which is recomputed, in each of 3 steps
        assert error < 1e-5
