"""Metrics say what the step did, and DeepSpeed's monitors get them."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import metrics_jobs

RANKS = (1, 2, 3)
METRICS = [(n, s) for n in RANKS for s in range(4) if n < 3 or s in (1, 3)]
QUICK_METRICS = [(1, 0), (2, 2), (3, 3)]


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, QUICK_METRICS))
def test_metrics_tell_what_the_step_did(ranks, stage):
    got = worlds.once(ranks, metrics_jobs.metrics, stage)[0]
    for told, groups in zip(got["told"], got["expected"], strict=True):
        for i, (moved, weight) in enumerate(groups):
            assert told[f"update_rms/{i}"] == pytest.approx(moved, rel=1e-3)
            assert told[f"weight_rms/{i}"] == pytest.approx(weight, rel=1e-3)
        clipped = min(1.0, 0.2 / told["grad_norm"])
        assert told["clip_coefficient"] == pytest.approx(clipped, rel=1e-4)
        assert told["clipped_fraction"] == (told["grad_norm"] > 0.2)
        assert told["skipped_parameters"] == told["skipped_steps"] == 0
        assert (told["bytes_sent"] > 0) == (ranks > 1)
    assert any(told["clipped_fraction"] for told in got["told"])


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, QUICK_METRICS))
def test_the_monitors_of_deepspeed_get_the_metrics(ranks, stage):
    got = worlds.once(ranks, metrics_jobs.metrics, stage)[0]
    for name in ("grad_norm", "update_rms_0", "clip_coefficient", "skipped_parameters"):
        rows = got["events"][f"Train_Samples_{name}"]
        told = [told[name.replace("_0", "/0")] for told in got["told"]]
        assert [float(value) for _, value in rows] == pytest.approx(told)
        assert [int(samples) for samples, _ in rows] == [4 * ranks * n for n in (1, 2, 3)]
