"""Settings of an engine that have several spellings in its config, or that DeepSpeed derives."""

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScalerBase

from ds_ext.config.refused import without_auto


def effective(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Returns an engine's config, with what DeepSpeed derives or spells in more than one way."""
    config: dict[str, Any] = without_auto(engine._config._param_dict)
    zero = config.get("zero_optimization", {})
    return config | {
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "sequence_parallel_size": engine.sequence_parallel_size,
        "zero_optimization": zero | {"stage": int(engine.zero_optimization_stage())},
    }


def counts_micro_batches(engine: DeepSpeedEngine) -> bool:
    """Returns whether the engine itself counts micro-batches; before DeepSpeed 0.19.4 all do."""
    told = getattr(engine, "managed_gradient_accumulation", None)
    return told is None or bool(told())


def loss_scaler(engine: DeepSpeedEngine) -> LossScalerBase:
    """Returns DeepSpeed's scaler for fp16 weights; for fp16 autocast, one with torch's settings."""
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        return DynamicLossScaler(2.0**16, 2000, 2.0**-24, 1, False, raise_error_at_min_scale=False)
    dtype = torch.float16 if engine.fp16_enabled() else torch.float32
    dynamic, args = engine.dynamic_loss_scale(), engine.dynamic_loss_scale_args()
    return CreateLossScaler(dtype, engine.loss_scale(), dynamic, args)
