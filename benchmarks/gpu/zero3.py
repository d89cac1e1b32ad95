"""DeepSpeed's ZeRO-3 on one rank, compared with plain steps.

The judge is that of ``ranks``. ``DS_EXT_COMMUNICATE_ALONE=1`` makes the rank call NCCL.
"""

import importlib.util
import os
from typing import Any
from unittest import mock

from torch import Tensor, nn

from benchmarks.gpu import ranks
from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting, Skip, separately, using_kernels
from benchmarks.train import join_world_of_one


def rows(on: Setting) -> Rows:
    """Trains by DeepSpeed's engine."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Skip("DeepSpeed is not installed")
    for row in separately(on, train_all, on):
        yield "ZeRO-3 on one rank", row


def join_alone(on: Setting) -> None:
    """Begins DeepSpeed on one rank."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
    join_world_of_one()
    deepspeed.init_distributed("gloo" if on.is_rehearsal else "nccl", verbose=False)


def train_all(on: Setting) -> list[Row]:
    """Trains by each optimizer."""
    join_alone(on)
    found = []
    with (
        mock.patch.dict(os.environ, {"DS_EXT_COMMUNICATE_ALONE": "1"}),
        using_kernels(on.trains_by),
    ):
        for name in on.some(ranks.OPTIMIZERS):
            before, expected, limit = ranks.judge(name, 1, on.device, on)
            error = ranks.error_of(by_engine(name, on), expected, before)
            verdict = RIGHT if error <= limit else WRONG
            found.append({"optimizer": name, "error": error, "limit": limit, "verdict": verdict})
    return found


def config(name: str, on: Setting) -> dict[str, Any]:
    """A config of DeepSpeed for fp32 weights, with the optimizer's defaults as the judge has."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": on.exact_bucket},
        "optimizer": {"type": name, "params": {}},
    }


def by_engine(name: str, on: Setting) -> list[Tensor]:
    """Weights after steps of DeepSpeed's engine."""
    import deepspeed

    model = ranks.model_of(on.device, on)
    engine, *_ = deepspeed.initialize(model=model, config=config(name, on))
    for step in range(on.exact_steps):
        engine.backward(ranks.loss_of(engine, step, 0, on.device, on))
        engine.step()
    found = wholes(engine.module)
    engine.destroy()
    return found


def wholes(model: nn.Module) -> list[Tensor]:
    """Copies of the weights; one rank's partitions are whole."""
    return [
        p.ds_tensor.detach()[: p.ds_numel].view(p.ds_shape).clone()  # type: ignore[attr-defined]
        for p in model.parameters()
    ]
