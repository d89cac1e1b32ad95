"""zero_grad() drops the step in progress: a skipped batch leaves no trace in the next step."""

import functools

import pytest
import torch

from tests import worlds
from tests.common.engines import alone
from tests.common.updates import check_each
from tests.distributed import skipped_batches_jobs
from tests.distributed.skipped_batches_jobs import HOW, LR

CASES = [(0, "fused", 1, 0.0), (3, "fused", 1, 0.0), (2, "fused", 1, 0.1)]
CASES += [(0, "sharded", 2, 0.0), (3, "sharded", 2, 0.1)]


def loss_of(model, number, rank, first):
    return model(skipped_batches_jobs.batch(first + number, rank))


@pytest.mark.parametrize("stage, policy, accumulation, max_norm", CASES)
def test_a_skipped_batch_leaves_no_trace(stage, policy, accumulation, max_norm):
    for steps in worlds.run(2, skipped_batches_jobs.engines, stage, policy, accumulation, max_norm):
        for step, (got, (how, _)) in enumerate(zip(steps, HOW, strict=True)):
            if policy == "sharded" or how.endswith("forward"):
                assert all(got["before"][n].equal(p) for n, p in got["last"].items()), how
            model = skipped_batches_jobs.make()
            model.load_state_dict(got["before"])
            sgd = torch.optim.SGD(model.parameters(), LR)
            loss = functools.partial(loss_of, first=accumulation * step)
            _, after, _ = alone(model, sgd, loss, 1, 2, max_norm, accumulation)
            check_each(got["after"], after, got["before"], 1)
            assert got["uses"] == [1, 1, 1, 1, 2, 2]
            assert got["gathered"] == got["waits"] == 0
            assert got["steps"] == step + 1
