"""Jobs of test_rehearsing.py: exact clipping by engines, of graphs that are hard to repeat."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests.common import fused_losses
from tests.distributed.training import whole

CLIP = 0.05


def start(model: nn.Module, stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 10,
            "reduce_bucket_size": 50,
        },
    } | more
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def in_place(stage: int) -> dict[str, Any]:
    """A loss that one rank's backward writes to in place: what all ranks are told, and after."""
    rank = dist.get_rank()
    model = fused_losses.make("saved")
    before = whole(model)
    engine = start(model, stage)
    model.factor = 2.0 if rank == 1 else 1.0
    message = ""
    try:
        engine.backward(engine(*fused_losses.batch(rank)))
    except RuntimeError as error:
        message = str(error)
    kept = all(torch.equal(before[n], x) for n, x in whole(model).items())
    model.factor = 1.0
    engine.backward(engine(*fused_losses.batch(10 + rank)))
    engine.step()
    return {"message": message, "kept": kept, "before": before, "after": whole(model)}
