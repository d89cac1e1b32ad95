"""Jobs of test_edited_weights.py: training whose weights are edited after each step."""

import contextlib
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests.common.ranks import whole
from tests.distributed.fully_shard_jobs import full
from tests.tools.old_checkpoints import Whole

HYPERS = {"lr": 5e-4, "weight_update": "master"}


def edited(way: int | str, dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """The whole weights after steps by one gradient, each followed by a clamp of all weights.

    ``way`` is "fused", "FSDP2" or a stage of ZeRO.
    """
    model = Whole().to(dtype)
    if way == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = ds_ext.AdaLomo(model.parameters(), **HYPERS)
    if isinstance(way, str):
        ds_ext.fuse_into_backward(model, optimizer)
    else:
        model = _engine(model, optimizer, way, dtype)
    for _ in range(steps):
        model.backward(model(0)) if isinstance(way, int) else model(0).backward()
        (model if isinstance(way, int) else optimizer).step()
        for p in model.parameters():
            with _editable(p, way):
                _local(p).clamp_(-0.5, 0.5)
    if way == "FSDP2":
        return {n: full(p).clone() for n, p in model.named_parameters()}
    return whole(model.module if isinstance(way, int) else model)


def _engine(model: Whole, optimizer: torch.optim.Optimizer, stage: int, dtype: torch.dtype) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _editable(p: Tensor, way: int | str) -> contextlib.AbstractContextManager[Any]:
    if way == 3:
        return deepspeed.zero.GatheredParameters([p], modifier_rank=0)
    return contextlib.nullcontext()


def _local(p: Any) -> Tensor:
    return p.to_local().detach() if hasattr(p, "to_local") else p.data
