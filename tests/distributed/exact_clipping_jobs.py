"""Jobs of test_exact_clipping.py: exact clipping by engines, of graphs that are hard to repeat."""

import tempfile
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import ds_ext
from tests.common import fused_losses
from tests.common.ranks import message
from tests.distributed.training_jobs import whole
from tests.unit.test_norm_prepass import Normed

CLIP = 0.05


def config(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10, "reduce_bucket_size": 50}
    return {"train_micro_batch_size_per_gpu": 8, "zero_optimization": zero}


def start(model: nn.Module, stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
    made = config(stage) | {"gradient_clipping": CLIP} | more
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]


def in_place(stage: int) -> dict[str, Any]:
    """A loss that one rank's backward writes to in place: what all ranks are told, and after."""
    rank = dist.get_rank()
    model = fused_losses.make("saved")
    before = whole(model)
    engine = start(model, stage)
    model.factor = 2.0 if rank == 1 else 1.0
    told = message(lambda: engine.backward(engine(*fused_losses.batch(rank))), RuntimeError)
    kept = all(torch.equal(before[n], x) for n, x in whole(model).items())
    model.factor = 1.0
    engine.backward(engine(*fused_losses.batch(10 + rank)))
    engine.step()
    return {"message": told, "kept": kept, "before": before, "after": whole(model)}


class ForTrainer(fused_losses.Classifier):
    """The same as a model of Hugging Face: the Trainer multiplies its loss by the ranks."""

    def forward(self, x: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": super().forward(x, labels)}


def large(model: nn.Module) -> nn.Module:
    """The same with weights of a fixed seed, and gradients whose norm is above 1."""
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p, std=2)
    return model


def trainer(stage: int, policy: str) -> dict[str, Any]:
    """HF Trainer, which clips to a norm of 1 by default, with a loss that writes in place."""
    model = large(ForTrainer("saved"))
    before = whole(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [
        {"x": x, "labels": y}
        for step in range(world)
        for x, y in zip(*fused_losses.batch(step), strict=True)
    ]
    lomo = {"optimizer": {"type": "Lomo", "params": {"lr": 0.5}}}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=1,
            learning_rate=0.5,
            lr_scheduler_type="constant",
            deepspeed=config(stage)
            | lomo
            | {"gradient_clipping": "auto", "ds_ext": {"gradient_policy": policy}},
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        made = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        told = message(made.train, RuntimeError)
    return {"message": told, "before": before, "after": whole(model), "rank": rank}


def normed(stage: int, reentrant: bool, policy: str) -> dict[str, Tensor]:
    """Weights and buffers after training with a checkpointed batch norm."""
    torch.manual_seed(5)
    model = Normed(reentrant)
    engine = start(model, stage, ds_ext={"gradient_policy": policy})
    for step in range(3):
        seed = 10 * step + dist.get_rank()
        engine.backward(engine(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))))
        engine.step()
    return whole(model) | {n: x.clone() for n, x in model.named_buffers()}
