"""Runs that are saved and gone on from: as they were, elsewhere, by DeepSpeed's tools."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import TrainingArguments

import ds_ext
from ds_ext.engine.checkpoint_contents import owned
from ds_ext.optimizer import OPTIMIZERS
from tests.common import by_role, engines, models, ranks, states
from tests.common.hypers import FOR_ALL, TRAINED
from tests.integration import trainer_jobs

ROWS = 6  # of a step, over all ranks
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lomo": ("lomo", {"lr": 0.1}),
    "adalomo": ("adalomo", {"lr": 0.05}),
    "adafactor": ("adafactor", {"lr": 0.05, "relative_step": False, "beta1": 0.9}),
    "came": ("came", {"lr": 2e-3}),
    "lamb": ("lamb", {"lr": 0.05}),
    "galore": ("galoreadamw", {"lr": 0.05, "rank": 3, "update_proj_gap": 2, "proj_type": "right"}),
    "galore left": ("galoreadamw", {"lr": 0.05, "rank": 3, "update_proj_gap": 2}),
    "adamw": ("adamw", {"lr": 0.05}),
    "averaged": ("adamw", {"lr": 0.05, "ema_decay": 0.9}),
    "flash 8-bit": ("flashadamw", {"lr": 0.05}),
    "lion 8-bit": ("lion", {"lr": 0.05, "nbits": 8}),
    "came 8-bit": ("came", {"lr": 2e-3, "nbits": 8}),
    "galore 8-bit": (
        "galoreadamw",
        {"lr": 0.05, "rank": 30, "nbits": 8, "min_8bit_size": 100, "update_proj_gap": 2},
    ),
}
KINDS |= {rule: (rule, {"lr": 0.02}) for rule in by_role.MATRICES}
KINDS["apollo"][1].update(rank=3, update_proj_gap=2)
KINDS["muon"][1].update(ns_dtype="fp32")
_KNOWN = {name for name, _ in KINDS.values()}
KINDS |= {rule: (rule, hypers) for rule, hypers in TRAINED.items() if rule in {*FOR_ALL} - _KNOWN}
STAGES = (0, 1, 2, 3)


class Wide(torch.nn.Module):
    """Weights whose 8-bit moments have several blocks, which cuts go through.

    The gradients are whole numbers, the same for any number of ranks: 8-bit rounding is not
    continuous, so nothing else compares.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(37, 41))
        self.tall = torch.nn.Parameter(torch.randn(61, 13))
        self.vector = torch.nn.Parameter(torch.randn(1100))
        self.small = torch.nn.Parameter(torch.randn(7))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        self.seen[0] += 1
        loss = tokens.sum() * 0.0
        for i, p in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(97 * step + i)
            g = torch.randint(-99, 99, p.shape, generator=generator, device=p.device).to(p.dtype)
            loss = loss + (p * g).sum()
        return loss


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    return Wide() if "8-bit" in kind else models.Rows(tensors=kind != "flat")


def start(
    kind: str, stage: int, seed: int = 7, hypers: dict[str, Any] | None = None, **more: Any
) -> deepspeed.DeepSpeedEngine:
    """An engine of this kind of run, all of its weights from ``seed``."""
    name, own = KINDS["came" if kind == "flat" else kind]
    model = model_of(kind)
    if seed != 7:
        for p in model.parameters():
            torch.nn.init.normal_(p)
    rates = {"warmup_num_steps": 10, "warmup_max_lr": own["lr"], "warmup_min_lr": own["lr"] / 5}
    usual = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero": {"stage3_param_persistence_threshold": 30},
        "scheduler": {"type": "WarmupLR", "params": rates},
    }
    if name in by_role.MATRICES:
        optimizer = OPTIMIZERS[name].for_model(model, **own, **(hypers or {}))
    else:
        params = list(model.parameters())
        groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1}]
        optimizer = OPTIMIZERS[name](groups, **own, **(hypers or {}))
    return engines.start(model, optimizer, stage, **usual | more)


def batch(step: int, passes: int = 1) -> torch.Tensor:
    """This rank's part of a step's tokens, whatever the number of ranks."""
    tokens = models.batch(step, 1)[0]
    tokens = torch.cat([tokens, models.batch(step + 1000, 1)[0]])
    return tokens.chunk(dist.get_world_size() * passes)[dist.get_rank()]


def steps(engine: deepspeed.DeepSpeedEngine, numbers: range) -> None:
    for step in numbers:
        engine.backward(engine(batch(step), step=step))
        engine.step()


def whole(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    weights = ranks.whole(engine.module)
    if not any(group.get("ema_decay") for group in engine.optimizer.param_groups):
        return weights
    with engine.optimizer.ema():
        return weights | {f"average of {n}": p for n, p in ranks.whole(engine.module).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def write(folder: str, kind: str, stage: int, way: str = "fp32") -> dict[str, Any]:
    """5 steps without a break and, gone on from a checkpoint of step 3, the same bit for bit.

    Returns the weights before and after.
    """
    hypers, more = BITS[way]
    engine, other = engines = [start(kind, stage, seed, hypers, **more) for seed in (7, 8)]
    if way == "loss scale":
        for made in engines:
            made.optimizer.loss_scaler.scale_window = 2
    before = whole(engine)
    steps(engine, range(3))
    engine.save_checkpoint(folder, client_state={"told": stage})
    held = fp32_of(engine)
    _, client = other.load_checkpoint(folder)
    assert states.same(held, fp32_of(other)) and client == {"told": stage}
    for made in engines:
        steps(made, range(3, 5))
    after = whole(engine)
    assert same(after, whole(other))
    assert engine.get_lr() == other.get_lr() and engine.global_steps == other.global_steps == 5
    metrics, resumed = (made.optimizer.metrics() for made in engines)
    assert all(metrics[key] == resumed[key] for key in ("grad_norm", "clip_coefficient"))
    if "8-bit" in kind:  # a buffer that counts
        assert next(other.module.buffers())[0] == 5
    if way == "clipped by the step before":
        assert metrics["clip_coefficient"] < 1
    if way.startswith("master"):  # what is held is more than bf16
        assert any((a != a.bfloat16()).any() for a in held)
    if way == "loss scale":  # it moved, so that its count had to be resumed
        assert engine.optimizer.loss_scale == other.optimizer.loss_scale != 2**16
    return {"before": before, "after": after}


def elsewhere(
    source: str, target: str, kind: str, stage: int, numbers: range
) -> dict[str, torch.Tensor]:
    """Goes on from another number of ranks' checkpoint, at this stage, and saves again."""
    engine = start(kind, stage, seed=8)
    engine.load_checkpoint(source)
    steps(engine, numbers)
    engine.save_checkpoint(target)
    return whole(engine)


def frozen(source: str, kind: str, stage: int, numbers: range) -> dict[str, torch.Tensor]:
    """Steps of a run in which some parameters are frozen at steps 2 and 3; saved after step 2.

    Begins with step 0, or goes on from the checkpoint, as ``numbers`` say.
    """
    engine = start(kind, stage, seed=8 if numbers.start else 7)
    if numbers.start:
        engine.load_checkpoint(source)
    before = whole(engine)
    for step in numbers:
        for i, p in enumerate(engine.module.parameters()):
            p.requires_grad_(i % 3 != 1 or step not in (2, 3))
        steps(engine, range(step, step + 1))
        if step == 2 and not numbers.start:
            engine.save_checkpoint(source)
    return {"before": before, "after": whole(engine)}


HALF = {"bf16": {"enabled": True}}
BITS = {
    "stochastic": ({"weight_update": "stochastic", "seed": 3}, HALF),
    "master": ({"weight_update": "master"}, HALF),
    "fp32": ({}, {}),
    "master24": ({"weight_update": "master24"}, HALF),
    "clipped by the step before": (
        {},
        {"gradient_clipping": 0.05, "ds_ext": {"clip_mode": "previous"}},
    ),
    "loss scale": (  # dynamic: it rises between the steps
        {},
        {
            "torch_autocast": {"enabled": True, "dtype": "float16"},
            "ds_ext": {"gradient_policy": "sharded"},
        },
    ),
}
OTHER_BITS = [
    (way, kind, stage)
    for way, kind in (("stochastic", "adalomo"), ("master", "came"))
    for stage in (0, 2, 3)
]
OTHER_BITS += [("stochastic", "lomo", 3), ("master", "galore 8-bit", 2)]
OTHER_BITS += [("master24", "came", 0), ("master24", "lomo", 2), ("master24", "adalomo", 3)]
OTHER_BITS += [(way, "flash 8-bit", 3) for way in ("clipped by the step before", "loss scale")]


def fp32_of(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """This rank's runs, with their masters."""
    optimizer, own = engine.optimizer.optimizer, owned(engine.optimizer.layout)
    return [optimizer.weights(p, o.run, o.shard).float().clone() for p, o in own.items()]


def message(action: Callable[[], Any]) -> str:
    return ranks.message(action, ds_ext.CheckpointError, ValueError, RuntimeError)


TRAINERS = {"adalomo": 3, "came": 2, "lora adalomo": 3}  # config, stage


def trainer(folder: str, name: str, way: str) -> dict[str, Any]:
    """HF Trainer, unchanged, that saves every four steps; and one that resumes from the fourth."""
    results: dict[str, Any] = {}
    stage, config = TRAINERS[name], name.split()[-1]
    arguments = trainer_jobs.ARGUMENTS | trainer_jobs.RATES.get(config, {})

    def make(output: str) -> trainer_jobs.Sequential:
        given = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=trainer_jobs.BATCH // dist.get_world_size(),
            deepspeed=trainer_jobs.config(config, stage),
            **(arguments | {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}),
        )
        model = trainer_jobs.model()
        if "lora" in name:
            model = trainer_jobs.adapted(model)
        return trainer_jobs.Sequential(model=model, args=given, train_dataset=trainer_jobs.data())

    if way == "write":
        first = make(folder)
        results["before"] = ranks.whole(first.model)
        first.train()
        results["first"] = ranks.whole(first.model_wrapped.module)
    second = make(f"{folder} {way}")
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    results["second"] = ranks.whole(second.model_wrapped.module)
    results["steps"] = [log["step"] for log in second.state.log_history if "loss" in log]
    return results
