"""TRL's SFTTrainer (``sft``) or DPOTrainer (``dpo``) at stage 3, as in docs/guides/trl.md."""

import sys

import tiny
import torch.distributed as dist
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed

KIND, SETTINGS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[sys.argv[1]]
rows = tiny.rows()
if sys.argv[1] == "dpo":
    rows = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " I do not know."}
        for row in rows
    ]
settings = SETTINGS(deepspeed=tiny.config(stage=3), **tiny.arguments())
reference = {"ref_model": tiny.llama()} if sys.argv[1] == "dpo" else {}
trainer = KIND(
    model=tiny.llama(),
    **reference,
    args=settings,
    train_dataset=Dataset.from_list(rows),
    processing_class=tiny.tokenizer(),
)
trainer.train()
tiny.finish(trainer, stage=3)
dist.destroy_process_group()
