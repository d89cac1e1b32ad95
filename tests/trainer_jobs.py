"""The HF Trainer runs of trainer_worker.py, their data, and a model small enough to repeat them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

STEPS = 10


@dataclass
class Job:
    config: str
    arguments: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # to the shipped config
    refused: bool = False


def _checkpointing(use_reentrant: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
    }


ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}
JOBS = {
    "adalomo": Job("adalomo"),
    "adalomo-reentrant": Job("adalomo", _checkpointing(True)),
    "adalomo-nonreentrant": Job("adalomo", _checkpointing(False)),
    "adafactor": Job("adafactor"),
    "lomo": Job("lomo"),
    "came": Job("came", {"learning_rate": 1e-3}),
    "scheduler": Job(
        "adalomo",
        changes={
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": "auto",
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                },
            }
        },
    ),
    "clipping": Job("adalomo", {"max_grad_norm": 1.0}, refused=True),
    "accumulation": Job("adalomo", {"gradient_accumulation_steps": 2}, refused=True),
}


class Sequential(Trainer):
    """A Trainer that takes the data in order, so that any number of ranks sees the same batches."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def data() -> list[dict[str, torch.Tensor]]:
    """40 sequences of 16 tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (40, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def model() -> LlamaForCausalLM:
    """A Llama of two layers with tied embeddings."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )
