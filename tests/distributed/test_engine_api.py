"""DeepSpeed's public methods of an engine: docs/engine-api.md, row by row; metrics, monitors."""

import csv
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_ext
from tests import worlds
from tests.common import engines, models
from tests.common.choose import params
from tests.common.ranks import REFUSALS, logged, shared_folder, whole
from tests.common.states import same
from tests.distributed import test_param_groups
from tests.distributed.test_safe_access import Pair, loss_of

ABSENT = ("fp32_partitioned_groups_flat", "averaged_gradients", "unscale_and_clip_grads")


def start(stage: int) -> deepspeed.DeepSpeedEngine:
    lomo = {"type": "LOMO", "params": {"lr": 0.1}}
    return engines.start(Pair(), None, stage, train_micro_batch_size_per_gpu=4, optimizer=lomo)


def backward(engine: deepspeed.DeepSpeedEngine, number: int, **more: Any) -> None:
    engine.backward(loss_of(engine, number, dist.get_rank()), **more)


def stepped(model: Pair, lr: float, *numbers: int) -> None:
    model.zero_grad()
    losses = [loss_of(model, n, rank) for n in numbers for rank in (0, 1)]
    (sum(losses) / len(losses)).backward()
    for p in (model.matrix, model.bias):
        p.data -= lr * p.grad


def assert_close(weights: dict[str, torch.Tensor], model: Pair, lr: float) -> None:
    for name in ("matrix", "bias"):
        p = model.get_parameter(name)
        assert (weights[name] - p).norm() <= 1e-5 * (lr * p.grad).norm(), name


def works(stage: int) -> None:
    engine, alone = start(stage), Pair()
    optimizer = engine.optimizer
    for number in (0, 3):  # an even number of steps: DeepSpeed counts on, with more micro-batches
        backward(engine, number)
        engine.allreduce_gradients()  # which have been reduced
        engine.step()
        stepped(alone, 0.1, number)
    assert_close(whole(engine.module), alone, 0.1)
    assert engine.was_step_applied() and engine.train_batch_size() == 8
    assert (engine.get_lr(), optimizer.get_lr(), optimizer.defaults["lr"]) == ([0.1], 0.1, 0.1)
    assert hasattr(optimizer, "parameter_offload") == (stage == 3)
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow) == (1.0, 1.0, False)
    assert len(optimizer.fp16_groups) == len(optimizer.param_groups)
    optimizer.set_lr(0.2)
    engine.set_train_batch_size(16)  # two micro-batches
    for number in (1, 2):
        backward(engine, number)
        engine.step()
    stepped(alone, 0.2, 1, 2)
    accumulated = whole(engine.module)
    assert_close(accumulated, alone, 0.2)
    engine.empty_partition_cache()
    assert same(accumulated, whole(engine.module))
    with shared_folder() as folder, logged() as said:
        is_saved = engine.save_16bit_model(folder, exclude_frozen_parameters=False)
    # At stage 3, DeepSpeed needs a switch that this config lacks.
    assert is_saved == (stage < 3)
    assert dist.get_rank() or bool(said) == (stage == 3)
    assert all("gather_16bit_weights_on_model_save" in line for line in said)
    engine.destroy()


def trains(engine: deepspeed.DeepSpeedEngine) -> None:
    """Begins a training of Trainer's under DeepSpeed that has FuseCallback too."""
    args = SimpleNamespace(world_size=2, max_grad_norm=0, gradient_accumulation_steps=1)
    args.deepspeed_plugin = object()
    given = {"model": engine.module, "optimizer": engine.optimizer}
    ds_ext.FuseCallback().on_train_begin(args, None, None, **given)


def refused(stage: int) -> None:
    """Calls that are refused say what to use, and change no weight."""
    engine = start(stage)
    optimizer, before = engine.optimizer, whole(engine.module)
    stranger = {"params": [torch.nn.Parameter(torch.ones(2))]}
    fuse = ds_ext.fuse_into_backward
    norm = functools.partial(torch.nn.utils.clip_grad_norm_, engine.parameters(), 1.0)
    takes = "takes no learning_rate.*remove optim"
    for call, words, *kinds in (
        (engine.coalesce_grad_reduction, "set_gradient_accumulation_boundary"),
        (engine.clip_fp32_gradients, "gradient_clipping"),
        (norm, "gradient_clipping"),
        (lambda: backward(engine, 0, learning_rate=0.1), takes, TypeError),
        (lambda: engine.backward(loss_of(engine, 0, 0), 0.1), takes, TypeError),
        (lambda: engine.backward(loss=torch.ones(2)), "must be a scalar", AssertionError),
        (lambda: optimizer.backward(loss_of(engine, 0, 0)), r"engine.backward\(loss\)"),
        (lambda: optimizer.load_state_dict({}), "engine.load_checkpoint"),
        (lambda: optimizer.step(closure=lambda: None), "no closure"),
        (lambda: fuse(engine.module, optimizer), "of a DeepSpeed engine.*remove the", TypeError),
        (lambda: trains(engine), "FuseCallback.*without DeepSpeed.*remove the callback", TypeError),
        (lambda: optimizer.add_param_group(stranger), "add_param_group.*not part of the model"),
        (lambda: engine.offload_states(device="nvme"), "NVMe|OffloadDeviceEnum.cpu"),
    ):
        with pytest.raises(tuple(kinds) or REFUSALS, match=words):
            call()
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    with pytest.raises(REFUSALS, match="has a gradient that did not come from backward"):
        engine.step()
    for name in ABSENT:
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=f"has no {name}: docs/engine-api.md"):
            getattr(optimizer, name)
    assert same(before, whole(engine.module))
    engine.destroy()


def metrics(stage: int, folder: str) -> dict[str, Any]:
    """The metrics of each step, what they ought to be, and what DeepSpeed's CSV monitor wrote."""
    monitor = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
    model = test_param_groups.network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    more = {"csv_monitor": monitor, "train_micro_batch_size_per_gpu": 4}
    optimizer = ds_ext.AdaLomo(groups, lr=0.01)
    engine = engines.start(model, optimizer, stage, gradient_clipping=0.2, **more)
    told, expected = [], []
    for step in range(3):
        before = whole(engine.module)
        engine.backward(test_param_groups.loss_of(engine, step, dist.get_rank()))
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


WARMUP = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
SCHEDULER = {"type": "WarmupLR", "params": WARMUP | {"warmup_type": "linear"}}


def counted(stage: int, policy: str, accumulation: int) -> list[tuple[Any, ...]]:
    """Trains by losses of several forward passes, by LOMO; by torch's SGD if ``policy`` is "".

    Returns whether each micro-batch ends a step, the rate, and DeepSpeed's counts after it.
    """
    model, told = models.layers(5, 8, 3), []
    kind = ds_ext.LOMO if policy else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.5)
    more = {"gradient_accumulation_steps": accumulation, "scheduler": SCHEDULER}
    engine = engines.start(model, optimizer, stage, policy, **more)
    for number in range(3 * accumulation):
        x = engines.rows(number, dist.get_rank(), 4, 5)
        engine.backward((engine(x[:2]) - engine(x[2:])).square().sum() + engine(x[1:3]).sum())
        is_boundary, lr = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0]
        engine.step()
        told.append((is_boundary, lr, engine.micro_steps, engine.global_steps))
    return told


@pytest.mark.parametrize("stage", params([0, 1, 2, 3], [1, 3]))
@pytest.mark.parametrize("job", [works, refused])
def test_each_call_does_what_deepspeed_says_or_tells_what_to_use(job, stage):
    worlds.run(2, job, stage)


RANKS = (1, 2, 3)
METRICS = [(n, s) for n in RANKS for s in range(4) if n < 3 or s in (1, 3)]


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, [(1, 0), (2, 2)]))
def test_metrics_tell_what_the_step_did(tmp_path, ranks, stage):
    got = worlds.run(ranks, metrics, stage, str(tmp_path))[0]
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


@pytest.mark.parametrize(
    "stage, accumulation", params([(0, 2), (1, 2), (2, 4), (3, 2)], [(1, 2), (2, 4)])
)
def test_steps_and_schedules_of_several_forward_passes_are_deepspeeds(stage, accumulation):
    ours, theirs = (worlds.run(2, counted, stage, how, accumulation)[0] for how in ("sharded", ""))
    assert ours == theirs and len({lr for _, lr, _, _ in ours}) > 1
