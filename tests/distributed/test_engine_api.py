"""DeepSpeed's public methods of an engine: docs/engine-api.md, row by row; metrics, monitors.

And safe_get_* and safe_set_* of ``deepspeed.utils``: right at every stage, or refused.
"""

import csv
import functools
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from torch import nn

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common import engines, models
from tests.common.choose import params
from tests.common.plain import mean_step
from tests.common.ranks import REFUSALS, logged, shared_folder, whole
from tests.common.states import same
from tests.distributed import test_param_groups

STAGES = (0, 1, 2, 3)


class Pair(nn.Module):
    """A matrix that no number of ranks divides, a vector, a frozen and an unused weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(7, 5).to(dtype))
        self.bias = nn.Parameter(torch.randn(7).to(dtype))
        self.frozen = nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (nn.functional.linear(x.to(self.matrix.dtype), self.matrix, self.bias)).square().sum()
        )


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(engines.rows(step, rank, 4, 5))


def of_config(stage: int) -> deepspeed.DeepSpeedEngine:
    lomo = {"type": "LOMO", "params": {"lr": 0.1}}
    return engines.start(Pair(), None, stage, train_micro_batch_size_per_gpu=4, optimizer=lomo)


def backward(engine: deepspeed.DeepSpeedEngine, number: int, **more: Any) -> None:
    engine.backward(loss_of(engine, number, dist.get_rank()), **more)


def stepped(model: Pair, lr: float, *numbers: int) -> None:
    losses = [loss_of(model, n, rank) for n in numbers for rank in (0, 1)]
    mean_step(torch.optim.SGD([model.matrix, model.bias], lr), losses)


def assert_close(weights: dict[str, torch.Tensor], model: Pair, lr: float) -> None:
    for name in ("matrix", "bias"):
        p = model.get_parameter(name)
        assert (weights[name] - p).norm() <= 1e-5 * (lr * p.grad).norm(), name


def works(stage: int) -> None:
    engine, alone = of_config(stage), Pair()
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
    engine = of_config(stage)
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
    for name in "fp32_partitioned_groups_flat averaged_gradients unscale_and_clip_grads".split():
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


METRICS = [(n, s) for n in (1, 2, 3) for s in STAGES if n < 3 or s in (1, 3)]


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
        assert told["skipped_parameters"] == told["skipped_steps"] == 0
        assert (told["bytes_sent"] > 0) == (ranks > 1)
    assert any(told["clip_coefficient"] < 1 for told in got["told"])
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


def start(
    stage: int, kind: str, policy: str = "fused", dtype: torch.dtype = torch.float32, **hypers: Any
) -> deepspeed.DeepSpeedEngine:
    model = Pair(dtype)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad], **hypers)
    bf16 = {"enabled": dtype == torch.bfloat16}
    return engines.start(model, optimizer, stage, policy, bf16=bf16)


def getters(param: nn.Parameter) -> list[Any]:
    return [
        utils.safe_get_full_fp32_param(param),
        utils.safe_get_full_optimizer_state(param, "exp_avg"),
        utils.safe_get_full_grad(param),
    ]


def read(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    assert found.pop("frozen") is None
    return found


def weights(stage: int, mode: str) -> None:
    """Weights are read whole, and as they are after they were set, also by a step."""
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    master = {} if mode == "fp32" else {"weight_update": mode}
    engine = start(stage, "lomo", dtype=dtype, lr=1e-3, **master)
    backward(engine, 0)
    engine.step()
    model = engine.module
    got, held = read(model), whole(model)
    assert getters(model.frozen) == [None] * 3
    for name, value in got.items():
        assert value.dtype == torch.float32 and value.shape == held[name].shape
        assert torch.equal(value.to(dtype), held[name]), name
    new = {"matrix": got["matrix"] + 1 / 3, "bias": got["bias"] * 2}
    for name, value in new.items():
        utils.safe_set_full_fp32_param(model.get_parameter(name), value)
    if stage == 3:
        with pytest.raises(AttributeError, match="does not support get_local_fp32_param"):
            utils.safe_get_local_fp32_param(model.bias)
    after, used = read(model), whole(model)
    for name, value in new.items():
        off = (after[name] - value).abs()  # in fp32, also where it is bf16
        assert (off <= (2**-8 / 254 * value.abs() if mode == "master24" else 0)).all(), name
        assert torch.equal(used[name], value.to(dtype)), name
    assert torch.equal(after["unused"], got["unused"])
    with pytest.raises(REFUSALS, match="matrix has 35 elements"):
        utils.safe_set_full_fp32_param(model.matrix, new["matrix"][1:])


def gradients(stage: int) -> None:
    """Gradients that are kept are read whole, and LOMO steps by what they are set to."""
    engine = start(stage, "lomo", "sharded", lr=0.1)
    model, rank, alone = engine.module, dist.get_rank(), Pair()
    with pytest.raises(REFUSALS, match=r"between engine.backward\(loss\) and engine.step\(\)"):
        utils.safe_get_full_grad(model.matrix)
    before = whole(model)
    engine.backward(loss_of(engine, 0, rank))
    got = {n: utils.safe_get_full_grad(p) for n, p in model.named_parameters()}
    assert got["frozen"] is None and got["unused"] is None
    utils.safe_set_full_grad(model.matrix, 2 * got["matrix"])
    utils.safe_update_full_grad_vectorized([model.bias], lambda g, p: 2 * g)
    engine.step()
    after = whole(model)
    (sum(loss_of(alone, 0, rank) for rank in range(2)) / 2).backward()
    for name in ("matrix", "bias"):
        g = alone.get_parameter(name).grad
        assert (got[name] - g).norm() <= 1e-6 * g.norm(), name
        moved = before[name] - after[name]
        assert (moved - 0.1 * 2 * g).norm() <= 1e-5 * moved.norm(), name
    engine.backward(loss_of(engine, 1, rank))
    utils.safe_set_full_grad(model.matrix, got["matrix"] * torch.nan)
    engine.step()
    assert same(after, whole(model))
    fused = start(stage, "lomo", "fused", lr=0.1)
    fused.backward(loss_of(fused, 0, rank))
    with pytest.raises(REFUSALS, match='matrix.*"gradient_policy": "sharded"'):
        utils.safe_get_full_grad(fused.module.matrix)


STATES = {  # by optimizer: names of what it keeps of a matrix and of a vector
    "lamb": (("exp_avg", "exp_avg_sq"), ("exp_avg", "v")),
    "came": (("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "r.row"), ("m", "exp_avg_sq")),
    "galoreadamw": (("exp_avg", "exp_avg_sq", "q"), ("exp_avg", "exp_avg_sq")),
}


def states(stage: int, kind: str) -> None:
    """States are read whole by all of their names, and as they are after they were set."""
    more = {"rank": 2} if kind == "galoreadamw" else {}
    engine = start(stage, kind, lr=1e-3, **more)
    model, get, alone = engine.module, utils.safe_get_full_optimizer_state, states_alone(kind)
    with pytest.raises(REFUSALS, match="no state yet"):
        get(model.matrix, STATES[kind][0][0])
    for number in range(2):
        backward(engine, number)
        engine.step()
    for (name, key), expected in alone.items():
        param = model.get_parameter(name)
        value = get(param, key)
        assert value.shape == expected.shape, key
        assert (value - expected).norm() <= 1e-5 * expected.norm(), key
        utils.safe_set_full_optimizer_state(param, value + 1, key)
        assert torch.allclose(get(param, key) - 1, value, atol=1e-6), key
    assert get(model.frozen, "exp_avg") is None
    with pytest.raises(REFUSALS, match="keeps no 'exp_avgs' of matrix; it keeps"):
        get(model.matrix, "exp_avgs")


def states_alone(kind: str) -> dict[tuple[str, str], torch.Tensor]:
    model = Pair()
    more = {"rank": 2} if kind == "galoreadamw" else {}
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[kind](params, lr=1e-3, **more)
    for number in range(2):
        mean_step(optimizer, [loss_of(model, number, rank) for rank in range(2)])
    paths = {"exp_avg": "m", "exp_avg_sq_row": "v.row", "exp_avg_sq_col": "v.col"}
    found = {}
    for name, keys in zip(("matrix", "bias"), STATES[kind], strict=True):
        param = model.get_parameter(name)
        for key in keys:
            value = optimizer.state[param]
            for inner in paths.get(key, "v" if key == "exp_avg_sq" else key).split("."):
                value = value[inner]
            value = value["full"] if isinstance(value, dict) else value
            found[name, key] = value.view_as(param) if value.numel() == param.numel() else value
    return found


def parted(stage: int) -> None:
    """A parameter is saved without its engine, and keeps nothing of one that has ended."""
    engine = start(stage, "lomo", lr=0.1)
    matrix = engine.module.matrix
    if stage < 3:  # DeepSpeed's own parameters cannot be saved
        file = io.BytesIO()
        torch.save(matrix, file)
        assert len(file.getvalue()) < 4000
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False), matrix)
    engine.destroy()
    names = ("_hp_mapping", "_z3_optimizer", "get_full_hp_param", "set_full_hp_grad")
    assert not [n for n in names if hasattr(matrix, n)]


CASES: list[Any] = [(job, (s,)) for job in (works, refused, gradients, parted) for s in STAGES]
CASES += [(weights, (stage, mode)) for stage in STAGES for mode in ("fp32", "master")]
CASES += [(weights, (3, "master24"))]
CASES += [(states, (stage, kind)) for stage in STAGES for kind in STATES]


@pytest.mark.parametrize("job, given", params(CASES, CASES[1::2]))
def test_each_call_does_what_deepspeed_says_or_tells_what_to_use(job, given):
    worlds.run(2, job, *given)
