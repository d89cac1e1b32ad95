"""Fine-tune with a loop of your own: what ds_ext needs of it is one import and a configuration.

    torchrun --nproc_per_node 2 examples/train_loop.py [MODEL_FOLDER]

On a machine without a GPU, put DS_ACCELERATOR=cpu before it.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from smollm2 import smollm2
from text_data import load_file, tokenize
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers.integrations import HfDeepSpeedConfig

import ds_ext  # noqa: F401  makes "AdaLomo" and the others known to DeepSpeed

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,  # more: gradients are kept until a step's last micro-batch
    "gradient_clipping": 0.0,  # AdaLomo bounds its updates itself; more: backward runs twice
    "bf16": {"enabled": DTYPE == torch.bfloat16},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdaLomo", "params": {"lr": 5e-4}},
}
STEPS = 40
OUT = "runs/train_loop"


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else smollm2(Path("runs/cache"))
    deepspeed.init_distributed()
    partitioned = HfDeepSpeedConfig(CONFIG)  # while it lives, from_pretrained loads in parts
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    del partitioned
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)

    rows = load_file(str(Path(__file__).parent / "data" / "devil_train.jsonl"))
    rows = tokenize(rows, tokenizer, max_length=128)
    collate = DataCollatorForSeq2Seq(tokenizer)
    batches = DataLoader(rows, 2, sampler=DistributedSampler(rows), collate_fn=collate)
    for step, batch in zip(range(STEPS), batches, strict=False):
        loss = engine(**batch.to(engine.device)).loss
        engine.backward(loss)  # each gradient is used and freed in here, as it appears
        engine.step()  # called for every micro-batch, also where several make a step
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss:.2f}, norm {engine.get_global_grad_norm():.2f}")

    engine.save_16bit_model(OUT)  # in fp32 where the weights are
    if engine.global_rank == 0:
        model.config.save_pretrained(OUT)
        tokenizer.save_pretrained(OUT)


if __name__ == "__main__":
    main()
