"""Settings that DeepSpeed derives, or that can be spelled in several ways."""

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScalerBase

from ds_ext.config.parsing import well_formed
from ds_ext.errors import raise_all


def effective(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Returns an engine's config, plus values that DeepSpeed derives or can spell in two ways.

    Raises:
        ValueError: a value does not have the type of its key.
    """
    config, malformed = well_formed(engine._config._param_dict)
    raise_all(malformed)
    zero = config.get("zero_optimization", {})
    return config | {
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "sequence_parallel_size": engine.sequence_parallel_size,
        "zero_optimization": zero | {"stage": int(engine.zero_optimization_stage())},
    }


def is_filled_in(engine: DeepSpeedEngine, bucket_size: int | None) -> bool:
    """Returns whether to replace a bucket size by the default: transformers writes it for "auto".

    It is the square of the hidden size, about a matrix, which is too little on a GPU.
    """
    config: Any = getattr(engine.module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", None)
    return engine.device.type == "cuda" and hidden is not None and bucket_size == hidden**2


def loss_scaler(engine: DeepSpeedEngine) -> LossScalerBase:
    """Returns DeepSpeed's loss scaler; for fp16 autocast, one with torch's default settings."""
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        return DynamicLossScaler(2.0**16, 2000, 2.0**-24, 1, False, raise_error_at_min_scale=False)
    dtype = torch.float16 if engine.fp16_enabled() else torch.float32
    dynamic, args = engine.dynamic_loss_scale(), engine.dynamic_loss_scale_args()
    return CreateLossScaler(dtype, engine.loss_scale(), dynamic, args)
