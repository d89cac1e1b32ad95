"""Fine-tune with a loop of your own: what ds_ext needs of it is one import and a configuration.

    torchrun --nproc_per_node 2 examples/train_loop.py [--model FOLDER]

Started again, it goes on from its newest checkpoint, on any number of ranks that divides BATCH.
With this on each of two hosts torchrun does so itself: when a rank dies it is started again, when
a host is lost the run goes on without it.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc_per_node 1 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400 examples/train_loop.py

On a machine without a GPU, put DS_ACCELERATOR=cpu before it.
"""

import argparse
from collections.abc import Callable

import deepspeed
import tiny
import torch
from text_data import load_file, tokenize
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers.integrations import HfDeepSpeedConfig

import ds_ext  # makes "AdaLomo" and the others known to DeepSpeed

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
BATCH = 4  # rows a step, over all ranks
CONFIG = {
    "train_batch_size": BATCH,
    "gradient_accumulation_steps": 1,  # more: gradients are kept until a step's last micro-batch
    "gradient_clipping": 0.0,  # AdaLomo bounds its updates itself; more: backward runs twice
    "bf16": {"enabled": DTYPE == torch.bfloat16},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def options(description: str, steps: int, save_every: int) -> argparse.Namespace:
    parser = tiny.parser(description, steps)
    parser.add_argument("--save-every", type=int, default=save_every, help="steps")
    return tiny.with_model(parser.parse_args())


def train(given: argparse.Namespace, after_step: Callable[[int], None] = lambda step: None) -> None:
    """Trains as one of the ranks, and calls ``after_step`` with the number of each step."""
    config = CONFIG | {"optimizer": {"type": "AdaLomo", "params": {"lr": given.lr}}}
    deepspeed.init_distributed()
    partitioned = HfDeepSpeedConfig(config)  # while it lives, from_pretrained loads in parts
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=DTYPE)
    del partitioned
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)

    rows = tokenize(load_file(str(tiny.DATA)), tokenizer, max_length=128)
    collate = DataCollatorForSeq2Seq(tokenizer)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    rank, world = engine.global_rank, torch.distributed.get_world_size()

    checkpoints = f"{given.out}/checkpoints"
    if newest := ds_ext.newest_checkpoint(checkpoints):  # complete and undamaged
        engine.load_checkpoint(newest.folder, newest.tag)
    for step in range(engine.global_steps, given.steps):
        chosen = [order[i % len(order)] for i in range(step * BATCH, (step + 1) * BATCH)]
        batch = collate([rows[i] for i in chosen[rank::world]])
        loss = engine(**batch.to(engine.device)).loss
        engine.backward(loss)  # each gradient is used and freed in here, as it appears
        engine.step()  # called for every micro-batch, also where several make a step
        if rank == 0:
            print(f"step {step}: loss {loss:.2f}, norm {engine.get_global_grad_norm():.2f}")
        if (step + 1) % given.save_every == 0:
            engine.save_checkpoint(checkpoints, tag="newest")  # takes the place of the one before
        after_step(step)

    engine.save_16bit_model(given.out)  # in fp32 where the weights are
    if rank == 0:
        model.config.save_pretrained(given.out)
        tokenizer.save_pretrained(given.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(options(__doc__, steps=40, save_every=20))
