"""DeepSpeed's public methods of an engine: docs/engine-api.md, row by row; metrics, monitors."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import engine_api_jobs
from tests.distributed.safe_access_jobs import Pair, loss_of

STAGES = params([0, 1, 2, 3], [1, 3])


@pytest.mark.parametrize("stage", STAGES)
def test_what_works_does_what_deepspeed_says(stage):
    for got in worlds.run(2, engine_api_jobs.works, stage):
        model = Pair()
        for lr, numbers, key in (
            (0.1, (0,), ""),
            (0.1, (3,), "after"),
            (0.2, (1, 2), "accumulated"),
        ):
            model.zero_grad()
            losses = [loss_of(model, n, rank) for n in numbers for rank in (0, 1)]
            (sum(losses) / len(losses)).backward()
            for name in ("matrix", "bias"):
                p = model.get_parameter(name)
                p.data -= lr * p.grad
                if key:
                    assert (got[key][name] - p).norm() <= 1e-5 * (lr * p.grad).norm(), name
        assert all(p.equal(got["emptied"][n]) for n, p in got["accumulated"].items())
        assert got["applied"] and got["lr"] == ([0.1], 0.1, 0.1) and got["batch"] == 8
        assert got["scale"] == (1.0, 1.0, False) and got["groups"]
        assert got["offload"] == (stage == 3)


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_work_says_what_to_use(stage):
    for told in worlds.run(2, engine_api_jobs.refused, stage):
        assert "set_gradient_accumulation_boundary" in told["coalesce"]
        assert (
            "gradient_clipping" in told["clip"] and "gradient_clipping" in told["clip_grad_norm_"]
        )
        assert "takes no learning_rate" in told["rate"] and "remove optim" in told["rate"]
        assert "engine.backward(loss)" in told["backward"]
        assert "add_param_group" in told["stranger"] and "not part of the model" in told["stranger"]
        assert "engine.load_checkpoint" in told["load"] and "no closure" in told["step"]
        assert "NVMe" in told["nvme"] or "OffloadDeviceEnum.cpu" in told["nvme"]
        for name in engine_api_jobs.ABSENT:
            assert f"has no {name}: docs/engine-api.md" in told[name]


RANKS = (1, 2, 3)
METRICS = [(n, s) for n in RANKS for s in range(4) if n < 3 or s in (1, 3)]
QUICK_METRICS = [(1, 0), (2, 2), (3, 3)]


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, QUICK_METRICS))
def test_metrics_tell_what_the_step_did(ranks, stage):
    got = worlds.once(ranks, engine_api_jobs.metrics, stage)[0]
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
    # DeepSpeed's monitors get them.
    for name in ("grad_norm", "update_rms_0", "clip_coefficient", "skipped_parameters"):
        rows = got["events"][f"Train_Samples_{name}"]
        told = [told[name.replace("_0", "/0")] for told in got["told"]]
        assert [float(value) for _, value in rows] == pytest.approx(told)
        assert [int(samples) for samples, _ in rows] == [4 * ranks * n for n in (1, 2, 3)]
