"""Clipping and accumulation on real ranks, by policy and stage, against one process."""

import pytest
import torch

from tests.common import authors
from tests.distributed import routing, training
from tests.distributed.training import RUNS, STEPS
from tests.support import of

pytestmark = pytest.mark.slow


def shown(name: str) -> str | list[str]:
    """The feature that a run shows; runs of one micro-batch and no clipping show none."""
    how = RUNS[name]
    if how.accumulation > 1:
        return "gradient accumulation" + (" with clipping" if how.max_norm else "")
    if how.clip_value:
        return "clipping by value"
    if how.clip_mode == "previous":
        return "clipping by the step before"
    kept = "kept" if how.policy == "sharded" else "not kept"
    return f"clipping to a norm, gradients {kept}" if how.max_norm else []


@pytest.mark.supports(shown, **of(RUNS))
@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process_with_the_global_batch(run, name):
    world, results = run
    got, how = results[f"training {name}"], RUNS[name]
    assert "error" not in got, got["error"]
    reference = training.Reference(how, authors.ordinary)
    before = {n: p.detach().clone() for n, p in reference.model.named_parameters()}
    for step in range(STEPS):
        reference.step(step, world)
    square = square_error = 0.0
    for n, p in reference.model.named_parameters():
        assert torch.equal(got["before"][n], before[n])
        update, error = (p - before[n]).norm(), (got["after"][n] - p).norm()
        assert error <= max(1e-5 * update, STEPS * 2**-24 * p.norm()), (n, error / update)
        square, square_error = square + update**2, square_error + error**2
    assert square_error**0.5 <= 1e-5 * square**0.5
    assert got["norms"] == pytest.approx(reference.norms, rel=1e-4)
    if how.max_norm:
        assert max(reference.norms) > 1.5 * how.max_norm  # or it would show nothing
    if how.clip_value:
        assert 0.01 < got["metrics"]["clipped_fraction"] < 1


@pytest.mark.supports("parameters that only some ranks use", **of(routing.RUNS))
@pytest.mark.parametrize("name", routing.RUNS)
def test_ranks_that_use_different_parameters_neither_hang_nor_drift(run, name):
    world, results = run
    got, how = results[f"routing {name}"], routing.RUNS[name]
    assert "error" not in got, got["error"]
    model, steps = routing.reference(how, world, authors.ordinary)
    assert got["drift"] == 0
    assert got["steps"] == {n: number for n, number in steps.items() if number}
    for n, p in model.named_parameters():
        update, error = (p - got["before"][n]).norm(), (got["after"][n] - p).norm()
        assert error <= max(1e-5 * update, routing.STEPS * 2**-24 * p.norm()), (n, error / update)
