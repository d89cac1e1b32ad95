"""Supervised fine-tuning with TRL, under PyTorch's FSDP2 with AdaLomo and without DeepSpeed.

torchrun --nproc_per_node 2 examples/trl_fsdp2.py
"""

import torch
from datasets import Dataset
from tiny import GPU, options, pairs
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

import ds_ext


def main() -> None:
    given = options(__doc__, steps=30)
    settings = SFTConfig(
        output_dir=given.out,
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
    ranks = DistributedConfig(fsdp_size=settings.world_size)  # FSDP2 over all of them
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, distributed_config=ranks),
        args=settings,
        train_dataset=Dataset.from_list(pairs()),
        optimizer_cls_and_kwargs=(ds_ext.AdaLomo, {"lr": given.lr}),
        callbacks=[ds_ext.FuseCallback()],  # steps each layer in backward
    )
    trainer.train()
    trainer.save_model()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
