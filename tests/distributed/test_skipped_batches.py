"""zero_grad() drops the step in progress: a skipped batch leaves no trace in the next step."""

import pytest
import torch

from tests import worlds
from tests.distributed import skipped_batches_jobs

WORLD = 2
CASES = [(0, "fused", 1, 0.0), (3, "fused", 1, 0.0), (2, "fused", 1, 0.1)]
CASES += [(0, "sharded", 2, 0.0), (3, "sharded", 2, 0.1)]


@pytest.mark.parametrize("stage, policy, accumulation, max_norm", CASES)
def test_a_skipped_batch_leaves_no_trace(stage, policy, accumulation, max_norm):
    results = worlds.run(WORLD, skipped_batches_jobs.engines, stage, policy, accumulation, max_norm)
    for rank, steps in enumerate(results):
        model = skipped_batches_jobs.make()
        for step, (got, (how, _)) in enumerate(zip(steps, skipped_batches_jobs.HOW, strict=True)):
            if policy == "sharded" or how.endswith("forward"):
                assert all(map(torch.equal, got["before"], got["last"])), (how, rank)
            _expected_step(model, got["before"], step, accumulation, max_norm)
            for p, q, start in zip(model.parameters(), got["after"], got["before"], strict=True):
                update = (p - start).norm()
                assert update > 0 and (p - q).norm() <= 1e-5 * update + 1e-7 * p.norm(), how
            assert got["uses"] == [1, 1, 1, 1, 2, 2]
            assert got["gathered"] == got["waits"] == 0
            assert got["steps"] == step + 1


def _expected_step(model, start, step, accumulation, max_norm) -> None:
    """Plain SGD from ``start``, on the mean over ranks and micro-batches."""
    with torch.no_grad():
        for p, q in zip(model.parameters(), start, strict=True):
            p.copy_(q)
            p.grad = None
    for part in range(accumulation):
        for rank in range(WORLD):
            loss = model(skipped_batches_jobs.batch(10 * step + part, rank))
            (loss / WORLD / accumulation).backward()
    if max_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    with torch.no_grad():
        for p in model.parameters():
            p -= skipped_batches_jobs.LR * p.grad
