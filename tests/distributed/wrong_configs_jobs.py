"""Configs that DeepSpeed reads, and a script whose configs are wrong, as two ranks run it.

What is wrong is told by ``sys.excepthook``, as where a script ends; the last really ends it.
"""

import sys
from typing import Any

import deepspeed
import torch
from torch import nn

import ds_ext  # noqa: F401

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s

SIZES = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
OURS: dict[str, Any] = {"ds_ext": {}}  # else the config is another optimizer's
RIGHT = {"optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}}}
WRONG: dict[str, dict[str, Any]] = {
    "optimizer.type is 'AdaLom'": {"optimizer": {"type": "AdaLom"}},
    "optimizer.params.lrr": {"optimizer": {"type": "AdaLomo", "params": {"lrr": 1}}},
    "prescale_gradients": RIGHT | {"prescale_gradients": True},
    "zero_optimization.stge": RIGHT | {"zero_optimization": {"stge": 3}},
    "train_batch_size": RIGHT | {"train_batch_size": 7},
    "ds_ext.batch_splits = 2 has no effect under": {
        "optimizer": {"type": "AdamW"},
        "ds_ext": {"batch_splits": 2},
    },
    "ds_ext.clip_mode is 'previos'": RIGHT | {"ds_ext": {"clip_mode": "previos"}},
}

NVME = {"device": "nvme", "nvme_path": "/x"}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
KEPT = {"ds_ext": {"gradient_policy": "sharded"}}


def _zero(stage: Any, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def _ours(params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdaLomo", "params": params}}


# Changes of a right config, by the key that ``check`` and a run must name; None: both accept it.
JUDGED: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    # Numbers and booleans as text, which DeepSpeed converts.
    (None, _zero("3")),
    (None, _zero(3.0)),
    (None, _zero("2", reduce_bucket_size="5000")),
    (None, _zero(2, reduce_bucket_size=5e3)),
    (None, _zero("3", zero_hpz_partition_size="1")),
    (None, _zero(3, zero_quantized_nontrainable_weights="false", reduce_scatter="false")),
    (None, {"bf16": {"enabled": "true"}}),
    (None, {"bf16": {"enabled": 1}}),
    (None, {"fp16": {"enabled": "false"}}),
    (None, {"compile": {"deepcompile": "false"}}),
    ("zero_optimization.stage", _zero("three")),
    ("zero_optimization.stage", _zero(2.5)),
    ("zero_optimization.stage", _zero(4)),
    ("zero_optimization.stage", _zero(None)),
    ("zero_optimization.stage", _zero(True)),
    ("zero_optimization.offload_param.device", _zero("3", offload_param=NVME)),
    ("zero_optimization.offload_optimizer.device", _zero("2", offload_optimizer=NVME)),
    ("zero_optimization.zero_hpz_partition_size", _zero("2", zero_hpz_partition_size="2")),
    ("zero_optimization.reduce_bucket_size", _zero(2, reduce_bucket_size="5e3")),
    ("zero_optimization.reduce_bucket_size", _zero(2, reduce_bucket_size=0.5)),
    ("zero_optimization.reduce_bucket_size", _zero(2, reduce_bucket_size="0")),
    ("compile.deepcompile", {"compile": {"deepcompile": "true"}}),
    ("bf16.enabled", {"bf16": {"enabled": 2}}),
    # Sections.
    (None, {"zero_optimization": True}),
    (None, {"zero_optimization": False}),
    (None, _zero("auto")),
    (None, _ours(None)),
    (None, {"ds_ext": None}),
    ("zero_optimization", {"zero_optimization": None}),
    ("zero_optimization", {"zero_optimization": 3}),
    ("optimizer", {"optimizer": None} | OURS),
    ("optimizer", {"optimizer": "AdaLomo"} | OURS),
    ("optimizer", {"optimizer": {"type": None}} | OURS),
    ("optimizer.params", _ours([])),
    ("optimizer.params.lr", _ours({"lr": "1e-3"})),
    ("bf16", {"bf16": True}),
    ("fp16", {"fp16": []}),
    ("data_types", {"data_types": None}),
    ("checkpoint", {"checkpoint": None}),
    ("ds_ext", {"ds_ext": []}),
    ("ds_ext.shard_size", {"ds_ext": {"shard_size": "1"}}),
    ("scheduler", {"scheduler": None}),
    ("scheduler.params", {"scheduler": WARMUP | {"params": None}}),
    # Sizes and numbers that DeepSpeed takes as they are.
    (None, {"gradient_accumulation_steps": 2.0}),
    (None, {"gradient_clipping": None, "scheduler": WARMUP}),
    (None, {"data_types": {"grad_accum_dtype": "half"}} | KEPT),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": "2"}),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 0.5}),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": True}),
    ("train_batch_size", {"train_batch_size": "1"}),
    ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": None}),
    ("sequence_parallel_size", {"sequence_parallel_size": "1"}),
    ("gradient_clipping", {"gradient_clipping": "1.0"}),
    ("gradient_clipping", {"gradient_clipping": True}),
    ("data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": "FP32"}} | KEPT),
    ("communication_data_type", {"communication_data_type": "fp64"}),
]


def judged() -> list[str]:
    """The error of ``deepspeed.initialize`` with each config of ``JUDGED``; "" without one."""
    found = []
    for _, changes in JUDGED:
        try:
            deepspeed.initialize(model=nn.Linear(4, 4), config=SIZES | RIGHT | changes)
            found.append("")
        except (ValueError, AssertionError) as error:  # any other error is a crash
            found.append(str(error))
    return found


def main() -> None:
    for last, config in enumerate(WRONG.values(), 1 - len(WRONG)):
        try:
            deepspeed.initialize(model=nn.Linear(4, 4), config=SIZES | config)
        except Exception:
            if last == 0:
                raise
            sys.excepthook(*sys.exc_info())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
