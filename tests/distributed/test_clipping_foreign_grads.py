"""Exact clipping's first backward pass does not change .grad of parameters ds_ext does not step."""

import pytest
import torch

from tests import worlds
from tests.distributed import clipping_foreign_grads_jobs as job

WORLD = 2


def assert_as_reference(results, reentrant):
    wanted = job.reference(WORLD, reentrant)
    for rank, told in enumerate(results):
        before = [p for m in job.make(reentrant)[:2] for p in m.parameters()]
        for (others, weights), (all_others, after) in zip(told, wanted, strict=True):
            for got, expected in zip(others, all_others[rank], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            for got, expected, start in zip(weights, after, before, strict=True):
                assert (got - expected).norm() <= 1e-4 * (expected - start).norm()
            before = after


@pytest.mark.parametrize("stage, reentrant", [(0, False), (1, True), (2, False), (3, True)])
def test_gradients_beside_an_engine(stage, reentrant):
    results = worlds.run(WORLD, job.engines, stage, reentrant)
    assert_as_reference(results, reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_beside_fsdp2(reentrant):
    assert_as_reference(worlds.run(WORLD, job.fused, reentrant), reentrant)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_of_deepspeeds_own_in_the_loss_is_refused(stage):
    for said in worlds.run(WORLD, job.beside_deepspeeds, stage):
        assert "DeepSpeed's own" in said and "sharded" in said


@pytest.mark.parametrize("stage, discard", [(0, True), (1, False), (2, True), (3, False)])
def test_a_batch_whose_measuring_pass_failed_leaves_no_trace(stage, discard):
    body = job.make(False)[0]
    for rank in range(WORLD):
        (body(job.batch(0, rank)).square().sum() / WORLD).backward()
    torch.nn.utils.clip_grad_norm_(body.parameters(), job.CLIP)
    torch.optim.SGD(body.parameters(), lr=job.LR).step()
    for before, between, after, steps in worlds.run(WORLD, job.failed, stage, discard):
        assert steps == [1, 1] and all(map(torch.equal, before, between))
        for p, q, start in zip(after, body.parameters(), before, strict=True):
            assert (p - q).norm() <= 1e-5 * (q - start).norm()
