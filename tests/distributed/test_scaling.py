"""fp16 on real ranks: overflows leave no trace but in scale and counters; torch autocast."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import scaling_jobs
from tests.distributed.scaling_jobs import PLANTED, RUNS, STEPS
from tests.tools.support import of

RANKS = (1, 2, 3)
ON_THREE = "-64"  # what is run on three ranks: those with a static loss scale
TRAINED = [name for name, run in RUNS.items() if run.planted and run.how == "engine"]


ALL = [(n, name) for n in RANKS for name in TRAINED if n < 3 or ON_THREE in name]
ALL = [(n, name) for n, name in ALL if n == 2 or RUNS[name].rule == "lomo"]
# Static and dynamic scales, both policies, all stages.
QUICK = [(2, "stage0-fused-0.1-dynamic-True"), (2, "stage1-sharded-0.0-64.0-True")]
QUICK += [(2, "stage1-sharded-0.0-dynamic-True"), (2, "stage2-fused-0.0-64.0-True")]
QUICK += [(2, "stage2-sharded-0.1-dynamic-True"), (2, "stage3-fused-0.1-64.0-True")]
QUICK += [(2, "stage3-sharded-0.1-dynamic-True"), (3, "stage3-sharded-0.1-64.0-True")]


def results_of(ranks, name):
    return worlds.once(ranks, scaling_jobs.train, RUNS[name])[0]


@pytest.mark.supports(
    lambda name: f"fp16, {'static' if RUNS[name].static else 'dynamic'} loss scale", **of(RUNS)
)
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_a_step_that_overflows_is_as_if_it_had_not_been(ranks, name):
    got, without = results_of(ranks, name), results_of(ranks, name.replace("True", "False"))
    start = scaling_jobs.Net().state_dict()
    for n, p in got["after"].items():
        assert p.shape == start[n.removeprefix("average of ")].shape and p.isfinite().all()
        if RUNS[name].static:
            assert torch.equal(p, without["after"][n])
        else:  # another scale rounds the smallest gradients otherwise
            assert (p - without["after"][n]).norm() <= 1e-3 * p.norm()
    assert set(got["steps"].values()) == {STEPS - len(PLANTED)}
    assert [r for i, r in enumerate(got["rates"]) if i not in PLANTED] == without["rates"]
    assert got["skipped"] == [sum(step >= at for at in PLANTED) for step in range(STEPS)]
    assert without["skipped"] == [0] * (STEPS - len(PLANTED))
    assert got["parameters"] == len(start) * len(PLANTED)


@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_the_loss_scale_follows_overflows(ranks, name):
    scales = results_of(ranks, name)["scales"]
    if RUNS[name].static:
        assert scales == [64.0] * STEPS
    else:  # halved by each overflow, doubled after two steps without
        assert scales == [256] * 3 + [128] * 3 + [64] * 2
        assert results_of(ranks, name.replace("True", "False"))["scales"][3:] == [512, 512, 1024]


@pytest.mark.parametrize("ranks", params(RANKS, ()))
def test_all_ways_end_at_the_same_weights(ranks):
    """Policy, stage and the way backward is called change nothing where gradients are clipped."""
    first = results_of(ranks, "stage2-fused-0.1-64.0-True")
    for name, how in RUNS.items():
        if how.rule == "lomo" and how.max_norm and how.static and how.planted:
            for n, p in results_of(ranks, name)["after"].items():
                assert (p - first["after"][n]).norm() <= 1e-3 * p.norm(), (name, n)
            assert results_of(ranks, name)["norm"] > how.max_norm


@pytest.mark.parametrize("ranks", params(RANKS, (2,)))
def test_a_loss_that_is_not_scaled_is_an_error_before_anything_moves(ranks):
    message = worlds.once(ranks, scaling_jobs.unscaled)[0]
    assert "engine.backward(loss)" in message and "current scale 64" in message


AUTOCAST = [(n, stage, "adalomo") for n in (1, 2) for stage in range(4)] + [(3, 3, "adalomo")]
AUTOCAST += [(2, stage, "muon") for stage in range(4)]
QUICK_AUTOCAST = [(2, stage, "adalomo") for stage in range(4)]


@pytest.mark.supports("`torch_autocast`", stage="stage", optimizer="rule")
@pytest.mark.parametrize("dtype, error", [("bfloat16", 1e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("ranks, stage, rule", params(AUTOCAST, QUICK_AUTOCAST))
def test_autocast_follows_torch_in_one_process(ranks, stage, rule, dtype, error):
    got = worlds.once(ranks, scaling_jobs.autocast, stage, dtype, rule)[0]
    assert got["dtypes"] == {"torch.float32"} and got["comm"] == {getattr(torch, dtype)}
    assert got["scale"] == (2**16 if dtype == "float16" else 1)
    model = scaling_jobs.autocast_reference(ranks, getattr(torch, dtype), rule, got["told"])
    # gradients are rounded once more to be sent
    check_each(got["after"], dict(model.named_parameters()), got["before"], close=error)
