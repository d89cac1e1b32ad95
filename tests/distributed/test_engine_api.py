"""DeepSpeed's public methods of an engine: docs/engine-api.md, row by row; metrics, monitors."""

import csv
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import logged, message, shared_folder, whole
from tests.distributed import param_groups_jobs
from tests.distributed.safe_access_jobs import Pair, loss_of

ABSENT = ("fp32_partitioned_groups_flat", "averaged_gradients", "unscale_and_clip_grads")


def start(stage: int) -> deepspeed.DeepSpeedEngine:
    lomo = {"type": "LOMO", "params": {"lr": 0.1}}
    return engines.start(Pair(), None, stage, train_micro_batch_size_per_gpu=4, optimizer=lomo)


def backward(engine: deepspeed.DeepSpeedEngine, number: int, **more: Any) -> None:
    engine.backward(loss_of(engine, number, dist.get_rank()), **more)


def works(stage: int) -> dict[str, Any]:
    """What calls give that work."""
    engine = start(stage)
    optimizer = engine.optimizer
    for number in (0, 3):  # an even number of steps: DeepSpeed counts on, with more micro-batches
        backward(engine, number)
        engine.allreduce_gradients()  # which have been reduced
        engine.step()
    found = {
        "after": whole(engine.module),
        "applied": engine.was_step_applied(),
        "lr": (engine.get_lr(), optimizer.get_lr(), optimizer.defaults["lr"]),
        "batch": engine.train_batch_size(),
        "offload": hasattr(optimizer, "parameter_offload"),
        "scale": (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow),
        "groups": len(optimizer.fp16_groups) == len(optimizer.param_groups),
    }
    optimizer.set_lr(0.2)
    engine.set_train_batch_size(16)  # two micro-batches
    for number in (1, 2):
        backward(engine, number)
        engine.step()
    found["accumulated"] = whole(engine.module)
    engine.empty_partition_cache()
    found["emptied"] = whole(engine.module)
    with shared_folder() as folder, logged() as found["saved"]:
        is_saved = engine.save_16bit_model(folder, exclude_frozen_parameters=False)
    assert is_saved == (stage < 3)
    engine.destroy()
    return found


def refused(stage: int) -> dict[str, str]:
    """The errors of calls that are refused, which change no weight."""
    engine = start(stage)
    optimizer, before = engine.optimizer, whole(engine.module)
    stranger = torch.nn.Parameter(torch.ones(2))
    told = {
        "coalesce": message(engine.coalesce_grad_reduction),
        "clip": message(engine.clip_fp32_gradients),
        "clip_grad_norm_": message(
            lambda: torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        ),
        "rate": message(lambda: backward(engine, 0, learning_rate=0.1), TypeError),
        "position": message(lambda: engine.backward(loss_of(engine, 0, 0), 0.1), TypeError),
        "by name": message(lambda: engine.backward(loss=torch.ones(2)), AssertionError),
        "backward": message(lambda: optimizer.backward(loss_of(engine, 0, 0))),
        "load": message(lambda: optimizer.load_state_dict({})),
        "step": message(lambda: optimizer.step(closure=lambda: None)),
        "stranger": message(lambda: optimizer.add_param_group({"params": [stranger]}), ValueError),
        "nvme": message(lambda: engine.offload_states(device="nvme")),
    }
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    told["written"] = message(engine.step)
    told |= {name: message(lambda n=name: getattr(optimizer, n), AttributeError) for name in ABSENT}
    after = whole(engine.module)
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert not any(hasattr(optimizer, name) for name in ABSENT)
    engine.destroy()
    return told


def metrics(stage: int) -> dict[str, Any]:
    """The metrics of each step, what they ought to be, and what DeepSpeed's CSV monitor wrote."""
    with shared_folder() as folder:
        return _metrics(stage, folder)


def _metrics(stage: int, folder: str) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
    model = param_groups_jobs.network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    more = {"csv_monitor": monitor, "train_micro_batch_size_per_gpu": 4}
    optimizer = ds_ext.AdaLomo(groups, lr=0.01)
    engine = engines.start(model, optimizer, stage, gradient_clipping=0.2, **more)
    told, expected = [], []
    for step in range(3):
        before = whole(engine.module)
        engine.backward(param_groups_jobs.loss_of(engine, step, dist.get_rank()))
        engine.step()
        after = whole(engine.module)
        told.append(engine.optimizer.metrics())
        expected.append([_rms(before, after, ndim) for ndim in (2, 1)])
    events = {}
    if dist.get_rank() == 0:
        for path in Path(folder, f"stage{stage}").glob("*.csv"):
            with path.open() as file:
                events[path.stem] = [row for row in csv.reader(file)][1:]
    return {"told": told, "expected": expected, "events": events}


def _rms(before, after, ndim: int) -> tuple[float, float]:
    chosen = [n for n in after if after[n].ndim == ndim]
    moved = torch.cat([(after[n] - before[n]).flatten() for n in chosen])
    weight = torch.cat([after[n].flatten() for n in chosen])
    return tuple(float(x.double().square().mean().sqrt()) for x in (moved, weight))


STAGES = params([0, 1, 2, 3], [1, 3])


@pytest.mark.parametrize("stage", STAGES)
def test_what_works_does_what_deepspeed_says(stage):
    found = worlds.run(2, works, stage)
    for got in found:
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
    # At stage 3, DeepSpeed needs a switch that this config lacks.
    assert bool(found[0]["saved"]) == (stage == 3)
    assert all("gather_16bit_weights_on_model_save" in line for line in found[0]["saved"])


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_work_says_what_to_use(stage):
    for told in worlds.run(2, refused, stage):
        assert "set_gradient_accumulation_boundary" in told["coalesce"]
        assert (
            "gradient_clipping" in told["clip"] and "gradient_clipping" in told["clip_grad_norm_"]
        )
        assert "takes no learning_rate" in told["rate"] == told["position"]
        assert "remove optim" in told["rate"] and "must be a scalar" in told["by name"]
        assert "engine.backward(loss)" in told["backward"]
        assert "add_param_group" in told["stranger"] and "not part of the model" in told["stranger"]
        assert "has a gradient that did not come from backward" in told["written"]
        assert "engine.load_checkpoint" in told["load"] and "no closure" in told["step"]
        assert "NVMe" in told["nvme"] or "OffloadDeviceEnum.cpu" in told["nvme"]
        for name in ABSENT:
            assert f"has no {name}: docs/engine-api.md" in told[name]


RANKS = (1, 2, 3)
METRICS = [(n, s) for n in RANKS for s in range(4) if n < 3 or s in (1, 3)]
QUICK_METRICS = [(1, 0), (2, 2), (3, 3)]


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, QUICK_METRICS))
def test_metrics_tell_what_the_step_did(ranks, stage):
    got = worlds.once(ranks, metrics, stage)[0]
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
