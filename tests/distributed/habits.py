"""What scripts do between steps: freeze, unfreeze, add groups, read metrics; and bits of bf16."""

import csv
import functools
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ds_ext
from tests.common.plain import mean_step
from tests.common.ranks import message, shared_folder, whole

STEPS = 7


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.third = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h).square().mean()


def make() -> Tower:
    torch.manual_seed(11)
    model = Tower()
    model.second.requires_grad_(False)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 6, generator=generator))


def groups(model: Tower) -> list[dict[str, Any]]:
    """Of what is trained from the beginning, with settings of their own."""
    first = {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.1}
    return [first, {"params": list(model.third.parameters()), "clip_threshold": 0.5}]


def before_step(model: Tower, optimizer, step: int) -> None:
    """What the script does between steps."""
    if step == 2:  # a layer is unfrozen and given to the optimizer
        model.second.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.03})
    if step == 3:
        model.first.requires_grad_(False)
    if step == 5:
        model.first.requires_grad_(True)


def edit_groups(model: Tower, optimizer, step: int) -> None:
    """What the script edits of the groups between steps."""
    groups = optimizer.param_groups
    if step == 1:
        del groups[0]["params"][1]
    if step == 2:
        groups[1] = {**groups[1], "lr": 0.05}
        groups[1]["params"] = [*groups[1]["params"], groups[0]["params"].pop()]
    if step == 4:
        del groups[0]
        groups[0]["params"].reverse()
    if step == 5:
        del groups[0]["params"][0]


CHANGES = {"layers": before_step, "groups": edit_groups}


def frozen(stage: int, policy: str, max_norm: float, changes: str = "layers") -> dict[str, Any]:
    """Freezing, unfreezing and a further group on the way; or edits of the groups."""
    model = make()
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "ds_ext": {"gradient_policy": policy},
    }
    optimizer = ds_ext.AdaLomo(groups(model), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    before = whole(model)
    for step in range(STEPS):
        CHANGES[changes](model, engine.optimizer, step)
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return {"before": before, "after": whole(model)}


def frozen_reference(world: int, max_norm: float, optimizer_type, changes="layers") -> Tower:
    model = make()
    optimizer = optimizer_type(groups(model), lr=0.01, relative_step=False)
    for step in range(STEPS):
        CHANGES[changes](model, optimizer, step)
        mean_step(optimizer, [loss_of(model, step, rank) for rank in range(world)], max_norm)
    return model


def stranger() -> str:
    """The error of a group whose parameter the engine does not know."""
    engine = start(make(), 3, {})
    group = {"params": [nn.Parameter(torch.ones(2))]}
    return message(lambda: engine.optimizer.add_param_group(group), ValueError)


def start(model: nn.Module, stage: int, extra: dict[str, Any]):
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **extra,
    }
    model.requires_grad_(True)
    optimizer = ds_ext.AdaLomo(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1]},
        ],
        lr=0.01,
    )
    return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]


def metrics(stage: int) -> dict[str, Any]:
    """The metrics of each step, what they ought to be, and what DeepSpeed's CSV monitor wrote."""
    with shared_folder() as folder:
        return _metrics(stage, folder)


def _metrics(stage: int, folder: str) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
    extra = {"csv_monitor": monitor, "gradient_clipping": 0.2}
    engine = start(make(), stage, extra)
    told, expected = [], []
    for step in range(3):
        before = whole(engine.module)
        engine.backward(loss_of(engine, step, dist.get_rank()))
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


class Linear(nn.Module):
    """A model whose gradient is the same small whole numbers on every rank: sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 29))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, step: int) -> torch.Tensor:
        g = torch.arange(13 * 29).view(13, 29) * (step + 3) % 7 - 3
        h = torch.arange(7) + step
        return (self.weight * g).sum() + (self.bias * h).sum()


def bits(stage: int, weight_update: str) -> dict[str, torch.Tensor]:
    """bf16 weights after steps whose gradients do not depend on the number of ranks."""
    torch.manual_seed(4)
    model = Linear()
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "optimizer": {
            "type": "LOMO",
            "params": {"lr": 1e-3, "weight_update": weight_update, "seed": 5},
        },
    }
    engine = deepspeed.initialize(model=model, config=made)[0]
    for step in range(10):
        engine.backward(engine(step))
        engine.step()
    return whole(model)


def bits_reference(weight_update: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    model = Linear().bfloat16()
    params = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = ds_ext.LOMO(params, lr=1e-3, weight_update=weight_update, seed=5)
    for step in range(10):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


class Checkpointed(Tower):
    """Its middle is run again: by DeepSpeed's own checkpointing, or selectively by torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle, h = nn.Sequential(self.second, nn.Tanh(), self.second), torch.tanh(self.first(x))
        if self.kind == "selective":
            saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
            contexts = functools.partial(create_selective_checkpoint_contexts, saved)
            h = checkpoint(middle, h, use_reentrant=False, context_fn=contexts)
        else:
            h = deepspeed.checkpointing.checkpoint(middle, h)
        return self.third(h).square().mean()


def checkpointed(stage: int, policy: str, max_norm: float, kind: str) -> dict[str, Any]:
    torch.manual_seed(11)
    model = Checkpointed(kind)
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "ds_ext": {"gradient_policy": policy},
    }
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    before = whole(model)

    for step in range(STEPS):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return {"before": before, "after": whole(model)}


def checkpointed_reference(world: int, max_norm: float) -> Tower:
    torch.manual_seed(11)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        losses = []
        for rank in range(world):
            generator = torch.Generator().manual_seed(10 * step + rank)
            h = torch.tanh(model.first(torch.randn(4, 6, generator=generator)))
            h = model.second(torch.tanh(model.second(h)))
            losses.append(model.third(h).square().mean())
        mean_step(optimizer, losses, max_norm)
    return model


RESUMED: dict[str, dict[str, Any]] = {
    "bf16 stochastic": {"bf16": {"enabled": True}},
    "bf16 master": {"bf16": {"enabled": True}, "weight_update": "master"},
    "bf16 master24": {"bf16": {"enabled": True}, "weight_update": "master24"},
    "clipped by the step before": {
        "gradient_clipping": 0.05,
        "ds_ext": {"clip_mode": "previous"},
    },
    "torch_autocast fp16": {  # a dynamic loss scale that rises between the steps
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "ds_ext": {"gradient_policy": "sharded"},
    },
}


def resumed(kind: str) -> dict[str, Any]:
    """Six steps without a break, and three, a checkpoint, a new engine and three more."""
    made = dict(RESUMED[kind])
    hypers = {"weight_update": made.pop("weight_update", "stochastic"), "seed": 3}

    def begin():
        torch.manual_seed(11)
        model = Tower()
        base = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
        optimizer = ds_ext.LAMB(model.parameters(), lr=0.01, **hypers)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=base | made)[0]

    def steps(engine, numbers):
        for step in numbers:
            dtype = torch.bfloat16 if "bf16" in made else torch.float32
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            engine.backward(engine(torch.randn(4, 6, generator=generator).to(dtype)))
            engine.step()

    first, second = begin(), begin()
    if engine_scale := getattr(first.optimizer.loss_scaler, "scale_window", None):
        assert engine_scale == 2000
        for engine in (first, second):
            engine.optimizer.loss_scaler.scale_window = 2
    steps(first, range(3))
    with shared_folder() as folder:
        first.save_checkpoint(folder, tag="three")
        steps(first, range(3, 6))
        second.load_checkpoint(folder, tag="three")
    steps(second, range(3, 6))
    a, b = whole(first.module), whole(second.module)
    return {
        "equal": all(torch.equal(a[n], b[n]) for n in a),
        "scales": (first.optimizer.loss_scale, second.optimizer.loss_scale),
        "metrics": (first.optimizer.metrics(), second.optimizer.metrics()),
    }
