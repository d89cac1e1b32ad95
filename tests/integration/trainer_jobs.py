"""HF Trainer runs with the shipped configs, their data, and a model small enough to repeat them."""

import json
import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import ds_ext  # noqa: F401 (registers the optimizers, all that a script has to do)
from tests.common import by_role
from tests.common.ranks import logged, message, whole
from tests.common.states import same
from tests.worlds import ROOT

STEPS = 7
BATCH = 4  # rows a step, over all ranks and micro-batches


@dataclass(frozen=True)
class Job:
    rule: str  # of the shipped config
    arguments: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # to the shipped config
    stage: int = 3
    lora: bool = False
    refused: bool = False

    @property
    def all_arguments(self) -> dict[str, Any]:
        return ARGUMENTS | RATES.get(self.rule, {}) | self.arguments

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that may interact, for ``choose.pairs``."""
        reentrant = self.arguments.get("gradient_checkpointing_kwargs", {}).get("use_reentrant")
        passes = self.max_norm > 0, self.accumulation, reentrant
        return self.rule, self.stage, self.lora, *passes, (*self.changes,)

    @property
    def max_norm(self) -> float:
        return self.all_arguments.get("max_grad_norm", 1.0)  # the Trainer's default

    @property
    def half(self) -> bool:
        return self.arguments.get("fp16", False)

    @property
    def accumulation(self) -> int:
        return self.arguments.get("gradient_accumulation_steps", 1)


def _checkpointing(use_reentrant: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
    }


ARGUMENTS: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1}
ARGUMENTS |= {"lr_scheduler_type": "cosine", "warmup_steps": 3}
ARGUMENTS |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
ARGUMENTS |= {"use_cpu": True, "disable_tqdm": True}
ARGUMENTS |= {"average_tokens_across_devices": True}  # the default since transformers 4.52
RATES = {"came": {"learning_rate": 1e-3}, "lomo": {"learning_rate": 0.1}}
RATES |= {name: {"learning_rate": 1e-3} for name in ("flashadamw", "apollomini", "muon")}
FREE = {"max_grad_norm": 0.0}
TIGHT = {"max_grad_norm": 0.1}
TIGHTER = {"max_grad_norm": 0.03}  # the norm of adapters' gradients is small
TWICE = {"gradient_accumulation_steps": 2}


def _jobs() -> dict[str, Job]:
    made = {name: Job(name, FREE) for name in ("adalomo", "adafactor", "came", "lomo")}
    made["flashadamw"] = Job("flashadamw", FREE)
    made["apollomini-clip"] = Job("apollomini", TIGHT)
    made["apollo"] = Job("apollo", FREE)
    made["muon-both"] = Job("muon", TIGHT | TWICE)
    made["lora-muon-stage3"] = Job("muon", TIGHTER, lora=True)
    for name in ("adalomo", "lomo"):
        made[f"{name}-clip"] = Job(name)  # to the Trainer's default, 1.0
    made["came-clip"] = Job("came", TIGHT)
    made["came-accumulation"] = Job("came", FREE | TWICE)
    made["lomo-accumulation"] = Job("lomo", FREE | TWICE)
    made["lomo-both"] = Job("lomo", TIGHT | TWICE)
    for use_reentrant in (True, False):
        kind = "reentrant" if use_reentrant else "nonreentrant"
        checkpointing = _checkpointing(use_reentrant)
        made[f"adalomo-{kind}"] = Job("adalomo", FREE | checkpointing)
        made[f"lomo-clip-{kind}"] = Job("lomo", TIGHT | checkpointing)
        made[f"lomo-both-{kind}"] = Job("lomo", TIGHT | TWICE | checkpointing)
    for stage in (2, 3):
        for name in ("adalomo", "came"):
            made[f"lora-{name}-stage{stage}"] = Job(name, TIGHTER | TWICE, stage=stage, lora=True)
    made["lora-lomo-nonreentrant"] = Job("lomo", TIGHTER | _checkpointing(False), lora=True)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}  # accelerate compiles it
    made["adalomo-compiled"] = Job("adalomo", FREE | compiled)
    for name, power in (("fp16", 8), ("fp16-overflow", 19)):
        fp16 = {"enabled": "auto", "initial_scale_power": power, "hysteresis": 1}
        made[f"lomo-{name}"] = Job("lomo", TIGHT | {"fp16": True}, {"fp16": fp16})
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    made["plateau"] = Job("adalomo", FREE | plateau, refused=True)
    return made


JOBS = _jobs()


class Sequential(Trainer):
    """A Trainer that takes the data in order, so that any number of ranks sees the same batches."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def data() -> list[dict[str, torch.Tensor]]:
    """40 sequences of 16 tokens, of which differently many are to be learnt."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (40, 16), generator=generator)
    return [
        {"input_ids": row, "labels": row.where(torch.arange(16) >= i % 7, -100)}
        for i, row in enumerate(rows)
    ]


def model(vocab: int = 67) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 50}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 64, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers, **more))


def adapted(base: LlamaForCausalLM) -> peft.PeftModel:
    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets))


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
        deepspeed=config(job.rule, job.stage) | job.changes,
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
    trainer = _trainer(folder, {"max_grad_norm": 0.125})
    del trainer.accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"]
    with logged() as said:
        trainer.train()
    lines = [line for line in said if "has no effect under DeepSpeed" in line]
    assert len(lines) == (dist.get_rank() == 0)
    for line in lines:
        assert "max_grad_norm = 0.125" in line and 'Set "gradient_clipping": 0.125 in' in line


def unread(folder: str) -> None:
    """A warning for each argument that would fill in a key which the config does not have."""
    made = config("adamw", 2)
    made["optimizer"]["params"] = {"lr": "auto"}
    arguments = {"deepspeed": made, "learning_rate": 0.125, "adam_beta1": 0.5, "adam_epsilon": 1e-8}
    trainer = _trainer(folder, arguments | {"weight_decay": 0.25})
    with logged() as said:
        trainer.train()
    keys = ["weight_decay", "adam_beta1 = 0.5, adam_beta2 = 0.999"]
    found = [line for line in said if "has no optimizer.params." in line]
    assert len(found) == (dist.get_rank() == 0) * len(keys), found
    assert all(key in line for key, line in zip(keys, found, strict=False))


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
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/tensorboard"
    made = config("adalomo", 3)
    mixture = [{"match": "mlp", "type": "AdamW", "lr": 1e-3}]
    made["optimizer"]["params"]["param_groups"] = mixture
    arguments = {"deepspeed": made, "max_steps": 4, "logging_steps": 2, "warmup_steps": 3}
    arguments["report_to"] = ["tensorboard"]
    trainer = _trainer(folder, arguments, callbacks=[ds_ext.MetricsCallback()])
    trainer.train()
    return {
        "log": trainer.state.log_history,
        "told": trainer.model_wrapped.optimizer.metrics(),
        "names": [group["name"] for group in trainer.model_wrapped.optimizer.param_groups],
    }
