"""The HF Trainer runs of trainer_jobs.py, their data, and a model small enough to repeat them."""

from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

STEPS = 10
BATCH = 4  # rows a step, over all ranks and micro-batches


@dataclass(frozen=True)
class Job:
    config: str
    arguments: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # to the shipped config
    stage: int = 3
    lora: bool = False
    refused: bool = False

    @property
    def all_arguments(self) -> dict[str, Any]:
        return ARGUMENTS | RATES.get(self.config, {}) | self.arguments

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


ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "average_tokens_across_devices": True,  # the default since transformers 4.52
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}
RATES = {"came": {"learning_rate": 1e-3}, "lomo": {"learning_rate": 0.1}}
RATES |= {name: {"learning_rate": 1e-3} for name in ("flashadamw", "apollomini", "muon")}
FREE = {"max_grad_norm": 0.0}
TIGHT = {"max_grad_norm": 0.1}
TIGHTER = {"max_grad_norm": 0.03}  # the norm of adapters' gradients is small
TWICE = {"gradient_accumulation_steps": 2}
WARMUP_DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "total_num_steps": "auto",
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
    },
}


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
    made["scheduler"] = Job("adalomo", FREE, {"scheduler": WARMUP_DECAY})
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
    """A Llama of two layers with tied embeddings."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )


def adapted(base: LlamaForCausalLM) -> peft.PeftModel:
    """The model with LoRA adapters, all else frozen."""
    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets))
