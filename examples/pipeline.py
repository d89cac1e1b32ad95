"""Fine-tune a Llama in stages of a pipeline, by DeepSpeed's PipelineModule.

    torchrun --nproc_per_node 2 examples/pipeline.py [--stages 2]

Ranks beyond the stages are data-parallel: 4 ranks and 2 stages are two pipelines. On a machine
without a GPU, put DS_ACCELERATOR=cpu before it.
"""

from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from tiny import GPU, parser, rows, with_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import ds_ext  # noqa: F401  makes "AdaLomo" and the others known to DeepSpeed

ROWS, MICRO_BATCHES = 2, 4  # of a micro-batch; of a step, on each pipeline
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,  # by the norm over all stages
    "bf16": {"enabled": GPU},
    "zero_optimization": {"stage": 1},
}


class Layer(nn.Module):
    """A layer of the model, which finds the positions of its tokens itself."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, places))


class Head(nn.Module):
    """What comes after the layers; the name ``lm_head`` tells optimizers what it is."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def batches(tokenizer, texts: list[str], pipeline: int, pipelines: int) -> Iterator:
    """The micro-batches of one of the pipelines, without end: tokens, and labels."""
    first = pipeline * ROWS
    while True:
        chosen = [texts[i % len(texts)] for i in range(first, first + ROWS)]
        first += pipelines * ROWS
        batch = tokenizer(
            chosen, padding="max_length", truncation=True, max_length=64, return_tensors="pt"
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        yield batch["input_ids"], labels


def main() -> None:
    options = parser(__doc__, steps=20)
    options.add_argument("--stages", type=int, default=2)
    given = with_model(options.parse_args())
    deepspeed.init_distributed()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    layers = [Layer(layer, model.model.rotary_emb) for layer in model.model.layers]
    net = PipelineModule(
        [model.model.embed_tokens, *layers, Head(model.model.norm, model.lm_head)],
        num_stages=given.stages,
        loss_fn=loss,
    )
    config = CONFIG | {"optimizer": {"type": "AdaLomo", "params": {"lr": given.lr}}}
    engine, _, _, _ = deepspeed.initialize(model=net, config=config)

    texts = [f"{row['instruction']} {row['output']}" for row in rows()]
    grid = net.mpu()
    data = batches(tokenizer, texts, grid.get_data_parallel_rank(), grid.data_parallel_size)
    for step in range(given.steps):
        mean = engine.train_batch(data)  # of all micro-batches; then every stage is stepped
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean:.2f}, norm {engine.get_global_grad_norm():.2f}")
    engine.save_checkpoint(given.out)  # loads with any number of stages
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
