"""Supervised fine-tuning with TRL, under ZeRO-3 with AdaLomo.

torchrun --nproc_per_node 2 examples/trl_sft.py
"""

import torch
from datasets import Dataset
from tiny import CONFIG, GPU, options, pairs
from trl import SFTConfig, SFTTrainer

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed


def main() -> None:
    given = options(__doc__, steps=30)
    settings = SFTConfig(
        output_dir=given.out,
        deepspeed=str(CONFIG),
        max_steps=given.steps,
        per_device_train_batch_size=4,
        max_length=128,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # AdaLomo bounds its updates itself; TRL's default would be honoured
        bf16=GPU,  # TRL's default is True
        use_cpu=not GPU,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model=given.model, args=settings, train_dataset=Dataset.from_list(pairs()))
    trainer.train()
    trainer.save_model()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
