"""Exact clipping by engines, of graphs that are hard to run backward twice."""

import pytest
import torch

from tests import worlds
from tests.common import fused_losses
from tests.distributed import rehearsing


def mean_step(model, losses):
    """A step of SGD, which LOMO's is, on the mean loss, clipped by torch."""
    model.zero_grad()
    (sum(losses) / len(losses)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), rehearsing.CLIP)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def assert_updates_equal(after, expected, before):
    for n, p in expected.items():
        assert (after[n] - p).norm() <= 1e-5 * (p - before[n]).norm(), n


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_that_one_rank_writes_to_in_place_is_refused_on_all(stage):
    plain = fused_losses.make(None)
    mean_step(plain, [plain(*fused_losses.batch(10 + rank)) for rank in range(2)])
    told = worlds.run(2, rehearsing.in_place, stage)
    for rank, got in enumerate(told):
        assert '"gradient_policy": "sharded"' in got["message"] and got["kept"]
        assert ("InPlaceCrossEntropy" if rank else "on another rank") in got["message"]
        assert_updates_equal(got["after"], plain.state_dict(), got["before"])
