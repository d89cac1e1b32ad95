"""Parses the DeepSpeed config settings that ds_ext uses."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from ds_ext import hyperparams
from ds_ext.backward.gradient_config import ConfigSection, GradientConfig

_DTYPES = {  # as DeepSpeed spells them
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}


def lookup(config: Any, key: str) -> Any:
    """Returns the value of a dotted key, or None if the key or one of its sections is missing."""
    for part in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(part)
    return config


def without_auto(config: Any) -> Any:
    """Returns a config without keys whose value is "auto", in all sections.

    Like DeepSpeed, ds_ext uses defaults for these keys. Every reader of a config calls this first.
    HF Trainer and accelerate have already replaced every "auto" that they support.
    """
    if not isinstance(config, dict):
        return config
    return {key: without_auto(value) for key, value in config.items() if value != "auto"}


def section(config: dict[str, Any]) -> ConfigSection:
    """Returns the section "ds_ext" of a DeepSpeed config.

    Raises:
        ValueError: a key is unknown or its value is invalid.
    """
    given = without_auto(config.get("ds_ext")) or {}
    if not isinstance(given, dict):
        raise ValueError(f'ds_ext is {given!r}; allowed: a section, {{"gradient_policy": ...}}.')
    return ConfigSection(**hyperparams.check(ConfigSection, given, "ds_ext"))


def unread(config: dict[str, Any], optimizer: str) -> Iterator[str]:
    """Yields a message for each setting of ds_ext under an ``optimizer`` that is not its own.

    Raises:
        ValueError: as of ``section``.
    """
    own, default = section(config), ConfigSection()
    for key in (f.name for f in dataclasses.fields(own)):
        if (value := getattr(own, key)) != getattr(default, key):
            yield (
                f"ds_ext.{key} = {value!r} has no effect under {optimizer}, which is no optimizer "
                'of ds_ext: remove it, or name one, such as "ds_ext.AdamW", in optimizer.type.'
            )


def gradients(
    config: dict[str, Any], monitored: bool = False, kept_for: str = ""
) -> GradientConfig:
    """Returns a DeepSpeed config's settings for reducing, keeping and clipping gradients.

    Args:
        config: a DeepSpeed config.
        monitored: whether a DeepSpeed monitor is enabled.
        kept_for: a feature without a config key that needs kept gradients; "" if there is none.

    Raises:
        ValueError: a value is invalid, or two keys contradict each other.
    """
    config = without_auto(config)
    own = section(config)
    kept = [
        f"{key} = {value!r}"
        for key, honoured in (
            ("gradient_accumulation_steps", 1),
            ("managed_gradient_accumulation", True),
        )
        if (value := config.get(key, honoured)) != honoured
    ]
    if kept_for and own.gradient_policy == "fused":
        raise ValueError(
            f'ds_ext.gradient_policy = "fused" keeps no gradients, as {kept_for} needs: remove it, '
            'and "sharded" is used.'
        )
    if kept and own.gradient_policy == "fused":
        raise ValueError(
            f'ds_ext.gradient_policy = "fused" keeps no gradients, as {kept[0]} needs: remove one.'
        )
    max_norm = config.get("gradient_clipping") or 0.0
    if not isinstance(max_norm, int | float) or not 0 <= max_norm < math.inf:
        raise ValueError(f"gradient_clipping is {max_norm!r}; allowed: a number >= 0.")
    dtype = lookup(config, "data_types.grad_accum_dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
        raise ValueError(f"data_types.grad_accum_dtype is {dtype!r}; allowed: fp32, bf16, fp16.")
    return GradientConfig(
        bucket_size=bucket_size(config),
        policy=own.gradient_policy or ("sharded" if kept or kept_for else "fused"),
        max_norm=float(max_norm),
        max_value=own.clip_value,
        clip_mode=own.clip_mode,
        accumulate_in=None if dtype is None else _DTYPES[dtype],
        measure_updates=monitored if own.measure_updates is None else own.measure_updates,
    )


def log_lines(grad_config: GradientConfig, bucket_size: int, config: dict[str, Any]) -> list[str]:
    """Returns log lines about bucket size and clipping."""
    lines = [f"buckets of {bucket_size:,} gradient elements (zero_optimization.reduce_bucket_size)"]
    if without_auto(config).get("gradient_clipping") is None:
        lines.append(
            "gradient_clipping is not set: nothing is clipped (DeepSpeed's own optimizers would "
            'clip at its default, 1.0). Write "gradient_clipping": 0 to say so.'
        )
    elif grad_config.max_norm:
        ways = {"exact": "exactly, by running backward twice", "previous": "approximately"}
        is_kept = grad_config.policy == "sharded"
        way = "exactly, by scaling the kept ones" if is_kept else ways[grad_config.clip_mode]
        lines.append(
            f"gradients are clipped to a norm of {grad_config.max_norm:g}, {way}. AdaLomo, "
            "Adafactor and CAME bound the RMS of each update: gradient_clipping = 0 costs nothing."
        )
    return lines


def bucket_size(config: dict[str, Any]) -> int | None:
    """Returns ``zero_optimization.reduce_bucket_size`` in elements; None if it is not set.

    Raises:
        ValueError: it is not a number of elements.
    """
    size = lookup(without_auto(config), "zero_optimization.reduce_bucket_size")
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise ValueError(
            f"zero_optimization.reduce_bucket_size is {size!r}; allowed: a number of elements >= 0."
        )
    return int(size)
