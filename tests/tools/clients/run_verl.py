"""verl's ``build_optimizer`` and a loop of its optimizer, as in docs/guides/verl.md.

verl's trainers need CUDA. This is the function by which its FSDP workers make their optimizer.
"""

import tiny
import torch
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

import ds_ext

torch.manual_seed(0)
config = FSDPOptimizerConfig(optimizer_impl="ds_ext", optimizer="AdaLomo", lr=tiny.RATE)
model = tiny.llama()
optimizer = build_optimizer(model.parameters(), config)
assert isinstance(optimizer, ds_ext.AdaLomo)

encode = tiny.tokenizer()
texts = [row["prompt"] + row["completion"] for row in tiny.rows()]
losses = []
for step in range(tiny.STEPS):
    batch = encode(texts[16 * step : 16 * (step + 1)], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
tiny.result(losses, ranks=1, stage="none")
