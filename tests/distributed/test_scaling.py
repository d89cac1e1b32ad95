"""fp16 on real ranks: overflows leave no trace but in scale and counters; torch autocast."""

import pytest
import torch

from tests.common import authors
from tests.distributed import scaling
from tests.distributed.scaling import PLANTED, RUNS, STEPS

pytestmark = pytest.mark.slow
TRAINED = [name for name, run in RUNS.items() if run.planted and run.how == "engine"]


def results_of(run, name):
    got = run[1][f"fp16 {name}"]
    assert "error" not in got, got["error"]
    return got


@pytest.mark.supports(
    lambda name: f"fp16, {'static' if RUNS[name].static else 'dynamic'} loss scale",
    stage=lambda name: RUNS[name].stage,
    optimizer="LOMO",
)
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_that_overflows_is_as_if_it_had_not_been(run, name):
    got, without = results_of(run, name), results_of(run, name.replace("True", "False"))
    start = scaling.Net().state_dict()
    for n, p in got["after"].items():
        assert p.shape == start[n].shape and p.isfinite().all()
        if RUNS[name].static:
            assert torch.equal(p, without["after"][n])
        else:  # another scale rounds the smallest gradients otherwise
            assert (p - without["after"][n]).norm() <= 1e-3 * p.norm()
    assert set(got["steps"].values()) == {STEPS - len(PLANTED)}
    assert [r for i, r in enumerate(got["rates"]) if i not in PLANTED] == without["rates"]
    assert got["skipped"] == [sum(step >= at for at in PLANTED) for step in range(STEPS)]
    assert without["skipped"] == [0] * (STEPS - len(PLANTED))
    assert got["parameters"] == len(start) * len(PLANTED)


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_scale_follows_overflows(run, name):
    scales = results_of(run, name)["scales"]
    if RUNS[name].static:
        assert scales == [64.0] * STEPS
    else:  # halved by each overflow, doubled after two steps without
        assert scales == [256] * 3 + [128] * 3 + [64] * 2
        assert results_of(run, name.replace("True", "False"))["scales"][3:] == [512, 512, 1024]


def test_all_ways_end_at_the_same_weights(run):
    """Policy, stage and the way backward is called change nothing where gradients are clipped."""
    first = results_of(run, "stage2-fused-0.1-64.0-True")
    for name, how in RUNS.items():
        if how.max_norm and how.static and how.planted:
            for n, p in results_of(run, name)["after"].items():
                assert (p - first["after"][n]).norm() <= 1e-3 * p.norm(), (name, n)
            assert results_of(run, name)["norm"] > how.max_norm


def test_a_loss_that_is_not_scaled_is_an_error_before_anything_moves(run):
    message = run[1]["fp16 unscaled"]
    assert "engine.backward(loss)" in message and "loss scale (64)" in message


@pytest.mark.supports("`torch_autocast`", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("dtype, error", [("bfloat16", 1e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("stage", range(4))
def test_autocast_follows_torch_in_one_process(run, stage, dtype, error):
    world, results = run
    got = results[f"autocast {stage} {dtype}"]
    assert "error" not in got, got.get("error")
    assert got["dtypes"] == {"torch.float32"} and got["comm"] == {getattr(torch, dtype)}
    assert got["scale"] == (2**16 if dtype == "float16" else 1)
    model = scaling.autocast_reference(world, getattr(torch, dtype), authors.ordinary)
    for n, p in model.named_parameters():
        update = (p - got["before"][n]).norm()  # gradients are rounded once more to be sent
        assert (got["after"][n] - p).norm() <= error * update, n
