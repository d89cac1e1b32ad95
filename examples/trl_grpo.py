"""GRPO with TRL and a reward function, under ZeRO-3 with AdaLomo.

    torchrun --nproc_per_node 2 examples/trl_grpo.py

The reward is the share of vowels, so that a model of any kind can learn it.
"""

import torch
from datasets import Dataset
from tiny import CONFIG, GPU, options, rows
from trl import GRPOConfig, GRPOTrainer

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed


def vowels(completions: list[str], **_) -> list[float]:
    """Which part of a completion's characters are vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    given = options(__doc__, steps=30, lr=0.2)
    settings = GRPOConfig(
        output_dir=given.out,
        deepspeed=str(CONFIG),
        max_steps=given.steps,
        per_device_train_batch_size=8,
        num_generations=8,  # completions of a prompt, which are compared with each other
        max_completion_length=16,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # AdaLomo bounds its updates itself; TRL's default would be honoured
        bf16=GPU,  # TRL's default is True
        use_cpu=not GPU,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=vowels,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["instruction"]} for row in rows()]),
    )
    trainer.train()
    trainer.save_model()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
