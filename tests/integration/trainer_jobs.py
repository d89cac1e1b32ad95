"""HF Trainer and accelerate runs with the shipped configs: jobs of test_trainer.py."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, TrainingArguments

import ds_ext  # noqa: F401 (registers the optimizers, all that a script has to do)
from tests.common import by_role
from tests.common.ranks import logged, message, whole
from tests.common.states import same
from tests.integration import own_loops
from tests.integration.trainer_runs import ARGUMENTS, BATCH, JOBS, Job, Sequential, adapted, data

ROOT = Path(__file__).parents[2]


def config(name: str, stage: int = 3) -> dict[str, Any]:
    """A shipped config, with buckets and partitions of a small model's size."""
    made = json.loads((ROOT / "configs" / f"{name}_zero3.json").read_text())
    made["zero_optimization"] |= {
        "stage": stage,
        "stage3_param_persistence_threshold": 100,
        "reduce_bucket_size": 5000,
    }
    return made


def load(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/model")


def train(folder: str, name: str) -> dict[str, Any]:
    """HF Trainer, unchanged, with a config from configs/; saves to ``folder``/``name``."""
    # Some CPUs do not hurry with fp16, that is all.
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        return _train(folder, name, JOBS[name])


def _train(folder: str, name: str, job: Job) -> dict[str, Any]:
    ranks = dist.get_world_size()
    arguments = TrainingArguments(
        output_dir=f"{folder}/{name}",
        per_device_train_batch_size=BATCH // (ranks * job.accumulation),
        deepspeed=config(job.config, job.stage) | job.changes,
        **job.all_arguments,
    )
    model = load(folder)
    if job.lora:
        model = adapted(model)
    trainer = Sequential(
        model=model, args=arguments, train_dataset=data(), eval_dataset=data()[:BATCH]
    )
    with logged() as said:
        trainer.train()
    trainer.save_model(f"{folder}/{name}")
    engine = trainer.model_wrapped
    return {
        "after": whole(engine.module),
        "said": said,
        "log": trainer.state.log_history,
        "streams": tuple(by_role.streams_of(engine.optimizer, dict(engine.param_names)).items()),
        "decays": {
            engine.param_names[p]: group["weight_decay"]
            for group in engine.optimizer.param_groups
            for p in group["params"]
        },
        "kept": sum(p.grad is not None for p in model.parameters()),
        "policy": engine.optimizer.fused.grad_config.policy,
        "state": len(engine.optimizer.state),
        "scale": engine.optimizer.loss_scale,
        "skipped": engine.skipped_steps,
    }


def accelerate(folder: str, name: str) -> dict[str, Any]:
    loop = own_loops.LOOPS[name]
    return own_loops.accelerated(loop, config(loop.config), lambda: load(folder))


def ignored(folder: str) -> None:
    """TrainingArguments that say of the optimizer what the config says otherwise are refused."""
    named = "TrainingArguments.optim = 'adalomo' would be ignored"
    galore = {"optim": "galore_adamw", "optim_target_modules": ["attn"]}
    refuse(_trainer(folder, {"optim": "adalomo"}), named)
    refuse(_trainer(folder, galore), "optim = 'galore_adamw' would be ignored")
    targets = {"optim_target_modules": "all-linear"}
    refuse(_trainer(folder, targets), "set target_modules in optimizer.params")
    refuse(_trainer(folder, {"optim_args": "rank=64"}), "optim_args = 'rank=64' would be ignored")
    refuse(_trainer(folder, {"optim": "adamw_torch"}), "")


def dropped(folder: str) -> None:
    """A Trainer that is given an optimizer itself.

    torch's object and class beside a config that names ours; an object of ours beside it; a class
    of ours beside one that names none, which trains; and an object of ours beside that.
    """
    cls_and_kwargs = {"optimizer_cls_and_kwargs": (ds_ext.LOMO, {"lr": 1e-3})}
    model = load(folder)
    theirs, ours = torch.optim.SGD(model.parameters()), ds_ext.LOMO(model.parameters(), lr=1e-3)
    for given, words in (
        ({"optimizers": (theirs, None)}, "Trainer(optimizers=...): SGD would be ignored"),
        (cls_and_kwargs, "Trainer(optimizer_cls_and_kwargs=...) would be ignored"),
        ({"optimizers": (ours, None)}, "Trainer(optimizers=...): LOMO would be ignored"),
    ):
        refuse(_trainer(folder, {}, model, **given), words)
    trainer = _trainer(folder, {}, model, False, **cls_and_kwargs)
    refuse(trainer, "")
    assert isinstance(trainer.model_wrapped.optimizer.optimizer, ds_ext.LOMO)
    with logged() as said:
        _trainer(folder, {}, model, False, optimizers=(ours, None)).train()
    replaced = "LOMO was made for this model, but AdamW steps it"
    assert (replaced in "\n".join(said)) == (dist.get_rank() == 0)


def unclipped(folder: str) -> None:
    """A warning where Trainer is asked to clip by what the config does not say."""
    trainer = _trainer(folder, {"max_grad_norm": 0.125})
    del trainer.accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"]
    with logged() as said:
        trainer.train()
    lines = [line for line in said if "has no effect under DeepSpeed" in line]
    assert len(lines) == (dist.get_rank() == 0)
    for line in lines:
        assert "max_grad_norm = 0.125" in line and 'Set "gradient_clipping": 0.125 in' in line


def _trainer(
    folder: str, arguments: dict[str, Any], model: torch.nn.Module | None = None,
    is_named: bool = True, **given: Any
) -> Sequential:  # fmt: skip
    """A Trainer of one step at stage 2 whose config names LOMO, or no optimizer."""
    made = config("lomo", 2)
    if not is_named:
        del made["optimizer"]
    args = TrainingArguments(
        output_dir=f"{folder}/ignored",
        per_device_train_batch_size=2,
        **{"deepspeed": made} | ARGUMENTS | {"max_steps": 1, "warmup_steps": 0} | arguments,
    )
    return Sequential(model=model or load(folder), args=args, train_dataset=data(), **given)


def refuse(trainer: Sequential, words: str) -> None:
    """Asserts that a Trainer raises these words and moves no weight; "": that it trains."""
    model = trainer.model
    before = {n: p.clone() for n, p in model.named_parameters()}
    told = message(trainer.train, ValueError, TypeError)
    assert words in told and bool(told) == bool(words), told
    assert same(before, dict(model.named_parameters())) == bool(told)


def reported(folder: str) -> dict[str, Any]:
    """A Trainer with the callback of metrics, reporting to TensorBoard."""
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/tensorboard"
    made = config("adalomo", 3)
    mixture = [{"match": "mlp", "type": "AdamW", "lr": 1e-3}]
    made["optimizer"]["params"]["param_groups"] = mixture
    more = {"max_steps": 4, "logging_steps": 2, "report_to": ["tensorboard"]}
    arguments = TrainingArguments(
        output_dir=f"{folder}/reported",
        per_device_train_batch_size=2,
        deepspeed=made,
        **ARGUMENTS | more,
    )
    trainer = Sequential(
        model=load(folder),
        args=arguments,
        train_dataset=data(),
        callbacks=[ds_ext.MetricsCallback()],
    )
    trainer.train()
    return {
        "log": trainer.state.log_history,
        "told": trainer.model_wrapped.optimizer.metrics(),
        "names": [group["name"] for group in trainer.model_wrapped.optimizer.param_groups],
    }
