"""Exact clipping by engines, of graphs that are hard to run backward twice."""

import pytest
import torch

from tests import worlds
from tests.common import fused_losses
from tests.common.plain import mean_step
from tests.common.updates import check_each
from tests.distributed import exact_clipping_jobs


def sgd_step(model, losses, max_norm=exact_clipping_jobs.CLIP):
    """A step of SGD, which LOMO's is -> the norm."""
    return mean_step(torch.optim.SGD(model.parameters(), lr=0.5), losses, max_norm)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_that_one_rank_writes_to_in_place_is_refused_on_all(stage):
    plain = fused_losses.make(None)
    sgd_step(plain, [plain(*fused_losses.batch(10 + rank)) for rank in range(2)])
    told = worlds.run(2, exact_clipping_jobs.in_place, stage)
    for rank, got in enumerate(told):
        assert '"gradient_policy": "sharded"' in got["message"] and got["kept"]
        assert ("InPlaceCrossEntropy" if rank else "on another rank") in got["message"]
        check_each(got["after"], plain.state_dict(), got["before"])


@pytest.mark.parametrize("world, policy", [(1, "fused"), (2, "fused"), (2, "sharded")])
def test_hf_trainer_clips_such_a_loss_exactly_or_says_what_to_set(world, policy):
    """It multiplies the loss by the number of ranks; DeepSpeed's mean is over as many."""
    plain = exact_clipping_jobs.large(fused_losses.Classifier(None, factor=world))
    for got in worlds.run(world, exact_clipping_jobs.trainer, 2, policy):
        if world > 1 and policy == "fused":
            assert "InPlaceCrossEntropy overwrites" in got["message"]
            assert all(torch.equal(x, got["before"][n]) for n, x in got["after"].items())
            continue
        if got["rank"] == 0:
            losses = [plain(*fused_losses.batch(rank)) for rank in range(world)]
            assert sgd_step(plain, losses, max_norm=1.0) > 1.2
        assert not got["message"]
        check_each(got["after"], plain.state_dict(), got["before"])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_measuring_leaves_the_buffers_of_checkpointed_segments_alone(stage, reentrant):
    once, twice = (
        worlds.run(2, exact_clipping_jobs.normed, stage, reentrant, policy)
        for policy in ("sharded", "fused")
    )
    for expected, got in zip(once, twice, strict=True):
        assert got["second.1.num_batches_tracked"] == 6
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=name)


CASES = [(0, False), (1, True), (2, False), (3, True), ("fsdp2", False), ("fsdp2", True)]


@pytest.mark.parametrize("stage, reentrant", CASES)
def test_gradients_of_others_are_those_of_one_pass(stage, reentrant):
    wanted = exact_clipping_jobs.reference(2, reentrant)
    for rank, told in enumerate(worlds.run(2, exact_clipping_jobs.train, stage, reentrant)):
        before = [p for m in exact_clipping_jobs.make(reentrant)[:2] for p in m.parameters()]
        for (others, weights), (all_others, after) in zip(told, wanted, strict=True):
            for got, expected in zip(others, all_others[rank], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            for got, expected, start in zip(weights, after, before, strict=True):
                assert (got - expected).norm() <= 1e-4 * (expected - start).norm()
            before = after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_of_deepspeeds_own_in_the_loss_is_refused(stage):
    for said in worlds.run(2, exact_clipping_jobs.beside_deepspeeds, stage):
        assert "DeepSpeed's own" in said and "sharded" in said
