"""Fine-tune without DeepSpeed: each weight is stepped inside ``loss.backward()``.

    python examples/plain_pytorch.py
    torchrun --nproc_per_node 2 examples/plain_pytorch.py

With several ranks each has all weights and the whole state of the optimizer, as in DDP.
"""

import os

import torch
import torch.distributed as dist
from tiny import GPU, options, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import ds_ext

BATCH = 4  # rows of a rank


def main() -> None:
    given = options(__doc__, steps=30)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else "cpu"

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model).to(device)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=given.lr)
    fused = ds_ext.fuse_into_backward(model, optimizer)

    texts = [f"{row['instruction']} {row['output']}" for row in rows()]
    for step in range(given.steps):
        first = (step * ranks + rank) * BATCH
        chosen = [texts[i % len(texts)] for i in range(first, first + BATCH)]
        batch = tokenizer(
            chosen, padding=True, truncation=True, max_length=128, return_tensors="pt"
        ).to(device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()  # each gradient is used and freed in here
        optimizer.step()  # ends the step
        if rank == 0:
            print(f"step {step}: loss {loss:.2f}, norm {fused.norm:.2f}")

    if rank == 0:
        model.save_pretrained(given.out)
        tokenizer.save_pretrained(given.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
