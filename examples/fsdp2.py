"""Fine-tune with PyTorch's FSDP2, each part of a weight stepped as soon as its gradient is reduced.

    torchrun --nproc_per_node 2 examples/fsdp2.py

Weights, gradients and the optimizer's state are cut over the ranks, without DeepSpeed.
"""

import os

import torch
import torch.distributed as dist
from tiny import GPU, options, rows
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import ds_ext

BATCH = 4  # rows of a rank


def main() -> None:
    given = options(__doc__, steps=30)
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if GPU else "cpu"
    mesh = init_device_mesh(device, (ranks,))

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=given.lr)  # after fully_shard
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
        loss.backward()  # gradients are reduced, used and freed in here, layer by layer
        optimizer.step()  # ends the step
        if rank == 0:
            print(f"step {step}: loss {loss:.2f}, norm {fused.norm:.2f}")

    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": states}, checkpoint_id=given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
