"""Runs that are saved and gone on from: as they were, elsewhere, by DeepSpeed's tools.

Usage: python -m tests.distributed.resuming OUT.pt [REGEX of phases]
"""

import re
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32
from transformers import TrainingArguments

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests.common import models
from tests.distributed import forks
from tests.integration import own_loops, trainer_jobs, trainer_worker

ROWS = 6  # of a step, over all ranks
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lomo": ("lomo", {"lr": 0.1}),
    "adalomo": ("adalomo", {"lr": 0.05}),
    "adafactor": ("adafactor", {"lr": 0.05, "relative_step": False, "beta1": 0.9}),
    "came": ("came", {"lr": 2e-3}),
    "lamb": ("lamb", {"lr": 0.05}),
    "galore": ("galoreadamw", {"lr": 0.05, "rank": 3, "update_proj_gap": 2, "proj_type": "right"}),
    "galore left": ("galoreadamw", {"lr": 0.05, "rank": 3, "update_proj_gap": 2}),
    "galore 8-bit": (
        "galoreadamw",
        {"lr": 0.05, "rank": 30, "nbits": 8, "min_8bit_size": 100, "update_proj_gap": 2},
    ),
}
STAGES = (0, 1, 2, 3)


class Rows(models.Zoo):
    """Its rows do not see each other, so that they may be divided among any number of ranks."""

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        return torch.stack([super(Rows, self).forward(row, step) for row in tokens.split(1)]).mean()


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
    return Wide() if "8-bit" in kind else Rows(tensors=kind != "flat")


def start(
    kind: str, stage: int, seed: int = 7, hypers: dict[str, Any] | None = None, **more: Any
) -> deepspeed.DeepSpeedEngine:
    """An engine of this kind of run, all of its weights from ``seed``."""
    name, own = KINDS["came" if kind == "flat" else kind]
    model = model_of(kind)
    if seed != 7:
        for p in model.parameters():
            torch.nn.init.normal_(p)
    made = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_num_steps": 10,
                "warmup_max_lr": own["lr"],
                "warmup_min_lr": own["lr"] / 5,
            },
        },
    } | more
    groups = [{"params": list(model.parameters())[::2]}, {"params": list(model.parameters())[1::2]}]
    groups[1]["weight_decay"] = 0.1
    optimizer = OPTIMIZERS[name](groups, **own, **(hypers or {}))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]


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
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {n: p.detach().clone() for n, p in engine.module.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def error(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> float:
    """|a - b| over the size of the update from ``before`` to b, of the whole model."""
    off = sum((a[n] - b[n]).double().square().sum() for n in b)
    update = sum((before[n] - b[n]).double().square().sum() for n in b)
    return float((off / update).sqrt())


# Phases: what each number of ranks does, in turn.


def write(folder: str) -> dict[str, Any]:
    """Two ranks: 6 steps without a break and, gone on from a checkpoint of step 3, the same."""
    results = {}
    for kind in KINDS:
        for stage in STAGES:
            engine = start(kind, stage)
            before = whole(engine)
            steps(engine, range(3))
            engine.save_checkpoint(f"{folder}/{kind} {stage}", client_state={"told": stage})
            steps(engine, range(3, 6))
            other = start(kind, stage, seed=8)
            _, client = other.load_checkpoint(f"{folder}/{kind} {stage}")
            steps(other, range(3, 6))
            results[kind, stage] = {
                "before": before,
                "after": whole(engine),
                "same": same(whole(engine), whole(other)),
                "lr": (engine.get_lr(), other.get_lr()),
                "counts": (engine.global_steps, other.global_steps),
                "client": client,
                "buffers": [b.clone() for b in other.module.buffers()],
            }
            engine.destroy()
            other.destroy()
    return results


def elsewhere(source: str, target: str, shift: int, numbers: range) -> dict[str, Any]:
    """Goes on from another number of ranks' checkpoints, at another stage, and saves again."""
    results = {}
    for kind in KINDS:
        for stage in STAGES:
            engine = start(kind, (stage + shift) % 4, seed=8)
            engine.load_checkpoint(f"{source}/{kind} {stage}")
            steps(engine, numbers)
            engine.save_checkpoint(f"{target}/{kind} {stage}")
            results[kind, stage] = whole(engine)
            engine.destroy()
    return results


HALF = {"bf16": {"enabled": True}}
BITS = {
    "stochastic": ({"weight_update": "stochastic", "seed": 3}, HALF),
    "master": ({"weight_update": "master"}, HALF),
    "fp32": ({}, {}),
}


def bits(folder: str) -> dict[str, Any]:
    """bf16 weights in all ways, at each stage: gone on from, bit for bit, and masters in fp32."""
    results = {}
    kinds = ("adalomo", "came", "lamb", "lomo", "galore 8-bit", "adafactor")
    for (way, (hypers, more)), kind in zip([*BITS.items()] * 2, kinds, strict=True):
        for stage in (0, 2, 3):
            name = f"{folder}/{way} {kind} {stage}"
            runs = [start(kind, stage, seed, hypers, **more) for seed in (7, 8)]
            steps(runs[0], range(3))
            runs[0].save_checkpoint(name)
            held = fp32_of(runs[0])
            runs[1].load_checkpoint(name)
            loaded = fp32_of(runs[1])
            for engine in runs:
                steps(engine, range(3, 6))
            results[way, kind, stage] = {
                "same": same(whole(runs[0]), whole(runs[1])),
                "held": all(torch.equal(a, b) for a, b in zip(held, loaded, strict=True)),
                "residual": any((a != a.bfloat16()).any() for a in held),
            }
            for engine in runs:
                engine.destroy()
    return results


def fp32_of(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """This rank's runs, with their masters."""
    owned, optimizer = engine.optimizer.owned(), engine.optimizer.optimizer
    return [optimizer.weights(p, own.run, own.shard).float().clone() for p, own in owned.items()]


PASSES = {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 1}


def accumulate(folder: str, stage: int, way: str) -> dict[str, Any]:
    """Saved between the micro-batches of a step, with gradients kept."""
    more = PASSES if dist.get_world_size() == 2 else PASSES | {"gradient_accumulation_steps": 6}
    passes = more["gradient_accumulation_steps"]

    def advance(engine, first, last):
        """From one third of a step to another; a third is 1 or 2 micro-batches."""
        for third in range(first, last):
            step, part = divmod(third, 3)
            tokens = torch.cat([models.batch(step + 1000 * i, 1)[0] for i in range(2)])
            own = tokens.chunk(3)[part].chunk(dist.get_world_size())[dist.get_rank()]
            for row in own.split(1):
                engine.backward(engine(row, step=step))
                engine.step()

    clip = {"gradient_clipping": 0.5}
    results = {}
    first = start("came", stage, 7, **(more | clip))
    before = whole(first)
    if way == "write":
        advance(first, 0, 4)
        first.save_checkpoint(folder)
        results["kept"] = len(first.optimizer.fused.tally.kept)
        advance(first, 4, 9)
    second = start("came", stage, 8, **(more | clip))
    second.load_checkpoint(folder)
    advance(second, 4, 9)
    results |= {"before": before, "after": whole(second), "micro": second.micro_steps / passes}
    results["same"] = same(whole(first), whole(second))
    if way == "write":  # 4 of 9 thirds of a step are no whole number of halves
        third = start("came", stage, 8, **(more | clip | {"gradient_accumulation_steps": 2}))
        results["message"] = message(lambda: third.load_checkpoint(folder))
    return results


def message(action) -> str:
    """The error of an action, or ""."""
    try:
        action()
    except (ds_ext.CheckpointError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def tools(folder: str) -> dict[str, Any]:
    """What DeepSpeed's own tools make of checkpoints of ours."""
    results = {}
    for stage in STAGES:
        for way in ("fp32", "master"):
            hypers, more = BITS[way]
            name = f"{folder}/{way} {stage}"
            gather = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
            engine = start("came", stage, 7, hypers, **more, zero_optimization=gather)
            engine.module.frozen.weight.requires_grad_(False)
            steps(engine, range(3))
            engine.save_checkpoint(name)
            engine.save_16bit_model(name, "model.bin")
            weights = whole(engine)
            other = start("lamb", stage, 8, hypers, **more)
            other.load_checkpoint(name, load_module_only=True)
            third = start("lamb", (stage + 1) % 4, 8, hypers, **more)
            steps(third, range(1))
            third.load_checkpoint(name, load_optimizer_states=False)
            if dist.get_rank() == 0:
                found = {}
                if stage:
                    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(name)
                plain = [
                    torch.load(file, weights_only=True) is not None
                    for file in Path(name).glob("*/*.pt")
                ]
                saved = torch.load(f"{name}/model.bin", weights_only=True)
                results[way, stage] = {
                    "zero_to_fp32": {n: found[n] for n in found if n in weights},
                    "weights": weights,
                    "16bit": {n: saved[n] for n in weights},
                    "plain": plain,
                }
            parts = whole(other), whole(third), len(third.optimizer.state), third.global_steps
            if dist.get_rank() == 0:
                results[way, stage] |= {"module only": parts[0], "no state": parts[1:]}
    return results


def adamw(folder: str) -> dict[str, Any]:
    """DeepSpeed's own AdamW saves."""
    results = {}
    for stage in STAGES:
        for dtype in ("fp32", "bf16"):
            model = model_of("flat")  # AdamW's clipping fails on scalars
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            made = {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": dtype == "bf16"},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
            steps(engine, range(1, 4))
            engine.save_checkpoint(f"{folder}/adamw {stage} {dtype}")
            results[stage, dtype] = whole(engine)
            engine.destroy()
    return results


def from_adamw(folder: str) -> dict[str, Any]:
    results = {}
    for stage in STAGES:
        for dtype in ("fp32", "bf16"):
            engine = start("flat", (stage + 2) % 4, 8, bf16={"enabled": dtype == "bf16"})
            steps(engine, range(1))
            path, _ = engine.load_checkpoint(f"{folder}/adamw {stage} {dtype}")
            weights, states = whole(engine), len(engine.optimizer.state)
            steps(engine, range(1, 3))
            results[stage, dtype] = {"weights": weights, "states": states, "path": path}
            engine.destroy()
    return results


TRAINERS = {"adalomo": 3, "came": 2, "lora adalomo": 3}  # config, stage


def trainer(folder: str, way: str) -> dict[str, Any]:
    """HF Trainer, unchanged, that saves every four steps; and one that resumes from the fourth."""
    results = {}
    for name, stage in TRAINERS.items():
        config = name.split()[-1]
        arguments = trainer_jobs.ARGUMENTS | trainer_jobs.RATES.get(config, {})
        output = f"{folder}/{name}"

        def make(output=output, arguments=arguments, name=name, stage=stage, config=config):
            given = TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=trainer_jobs.BATCH // dist.get_world_size(),
                deepspeed=trainer_worker.config(config, stage),
                **(arguments | {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}),
            )
            model = trainer_jobs.model()
            if "lora" in name:
                model = trainer_jobs.adapted(model)
            return trainer_jobs.Sequential(
                model=model, args=given, train_dataset=trainer_jobs.data()
            )

        if way == "write":
            first = make()
            before = own_loops.whole(first.model)
            first.train()
            results[name, "first"] = own_loops.whole(first.model_wrapped.module)
            results[name, "before"] = before
        second = make(output=f"{output} {way}")
        second.train(resume_from_checkpoint=f"{output}/checkpoint-4")
        results[name, "second"] = own_loops.whole(second.model_wrapped.module)
        results[name, "steps"] = [log["step"] for log in second.state.log_history if "loss" in log]
    return results


def phases(folder: str) -> dict[str, Any]:
    """Each phase: the number of ranks, and what they do."""
    return {
        "write": (2, write, f"{folder}/two"),
        "three": (3, elsewhere, f"{folder}/two", f"{folder}/three", 1, range(3, 5)),
        "one": (1, elsewhere, f"{folder}/three", f"{folder}/one", 2, range(5, 6)),
        "two again": (2, elsewhere, f"{folder}/two", f"{folder}/again", 3, range(3, 6)),
        "bits": (2, bits, f"{folder}/bits"),
        **{f"accumulated {s}": (2, accumulate, f"{folder}/kept {s}", s, "write") for s in STAGES},
        **{f"accumulated one {s}": (1, accumulate, f"{folder}/kept {s}", s, "") for s in STAGES},
        "trainer": (2, trainer, f"{folder}/trainer", "write"),
        "trainer one": (1, trainer, f"{folder}/trainer", "one"),
        "tools": (2, tools, f"{folder}/tools"),
        "adamw": (2, adamw, folder),
        "from adamw": (1, from_adamw, folder),
    }


def main() -> None:
    chosen = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    results = {}
    for name, (world, job, *args) in phases(sys.argv[1] + ".folder").items():
        if chosen.search(name):
            try:
                results[name] = forks.run(world, job, *args, timeout=120)
            except Exception:
                results[name] = traceback.format_exc()
            print(name, [e.code for e in results[name]], f"{results[name][0].seconds:.1f} s")
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
