"""Reads DeepSpeed configs as DeepSpeed does, and parses the settings that ds_ext uses.

The engine and the commands ``check``, ``plan`` and ``run`` share these functions.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ds_ext import hyperparams
from ds_ext.backward.gradient_config import ConfigSection, GradientConfig

_DTYPES = {  # as DeepSpeed spells them
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Sections that DeepSpeed requires to be objects. An optimizer or scheduler also needs a type.
_SECTIONS = (
    *("zero_optimization", "fp16", "bf16", "data_types", "checkpoint", "tensor_parallel"),
    *("compile", "torch_autocast", "activation_checkpointing", "pipeline", "flops_profiler"),
    *("hybrid_engine", "data_efficiency", "comms_logger", "weight_quantization"),
)
# Keys whose values DeepSpeed converts to these types, for example from "3" or "false".
_TYPES: dict[type, tuple[str, ...]] = {
    int: (
        *SIZES,
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.zero_hpz_partition_size",
    ),
    float: ("zero_optimization.offload_param.ratio", "zero_optimization.offload_optimizer.ratio"),
    bool: (
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
        "zero_optimization.ignore_unused_parameters",
        "zero_optimization.offload_optimizer.super_offload",
        "zero_optimization.reduce_scatter",
        "zero_optimization.zero_quantized_gradients",
        "zero_optimization.zero_quantized_nontrainable_weights",
        "zero_optimization.zero_quantized_weights",
        "bf16.enabled",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "compile.deepcompile",
        "fp16.enabled",
        "fp16.fp16_master_weights_and_grads",
    ),
}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    key: TypeAdapter(kind) for kind, keys in _TYPES.items() for key in keys
}


def load(path: Path) -> dict[str, Any]:
    """Returns the DeepSpeed config in a file.

    Raises:
        ValueError: the file is missing, or holds no JSON object, or holds a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
        if twice:
            raise ValueError(f"the key {twice[0]} is there twice")
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f'{path} holds no JSON object such as {{"optimizer": ...}}.')
    return config


def malformed(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each section that is not an object, and each size that is no number.

    DeepSpeed itself would fail with an error that does not name the key.

    Args:
        config: a DeepSpeed config as written, in which values may be "auto".
    """
    for key in _SECTIONS:
        value = config.get(key, {})
        is_old_format = key == "zero_optimization" and isinstance(value, bool)
        if not isinstance(value, dict) and not is_old_format:
            yield f"{key} is {value!r}; allowed: a section such as {{}}."
    for key in ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        if not isinstance(value := lookup(config, key), dict | None):
            yield f"{key} is {value!r}; allowed: a section such as {{}}."
    for key in ("optimizer", "scheduler"):
        value = config.get(key, {"type": "", "params": {}})
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            yield f'{key} is {value!r}; allowed: {{"type": ..., "params": ...}}.'
            continue
        params = value.get("params")
        is_default = key == "optimizer" and params is None
        if not isinstance(params, dict) and not is_default:
            yield f"{key}.params is {params!r}; allowed: an object such as {{}}."
    for key in (*SIZES, "sequence_parallel_size", "tensor_parallel.autotp_size"):
        size = lookup(config, key)
        least = int(key != "tensor_parallel.autotp_size")
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        if size not in (None, "auto") and not (is_number and size >= least and size % 1 == 0):
            yield f"{key} is {size!r}; allowed: a whole number >= {least}."
    for key in (*_TYPES[int], *_TYPES[float]):
        if key not in SIZES and isinstance(value := lookup(config, key), bool):
            yield f"{key} is {value!r}; allowed: a number."


def lookup(config: Any, key: str) -> Any:
    """Returns the value of a dotted key, or None if the key or one of its sections is missing."""
    for part in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(part)
    return config


def normalized(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with the values that DeepSpeed reads. Every reader calls this first.

    Leaves out keys whose value is "auto": like DeepSpeed, ds_ext uses defaults for them. HF Trainer
    and accelerate have already replaced every "auto" that they support. Leaves values as they are
    that DeepSpeed refuses.
    """
    read: dict[str, Any] = _without_auto(config)
    if isinstance(zero := read.get("zero_optimization"), bool):  # DeepSpeed's old format
        read["zero_optimization"] = {"stage": int(zero)}
    for key, adapter in _ADAPTERS.items():
        path, _, last = key.rpartition(".")
        section = lookup(read, path) if path else read
        value = section.get(last) if isinstance(section, dict) else None
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            with contextlib.suppress(ValidationError):
                section[last] = adapter.validate_python(value)
    return read


def _without_auto(value: Any) -> Any:
    """A copy of a value, without the keys of its sections that are "auto"."""
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(inner) for key, inner in value.items() if inner != "auto"}


def section(config: dict[str, Any]) -> ConfigSection:
    """Returns the section "ds_ext" of a DeepSpeed config.

    Raises:
        ValueError: a key is unknown or its value is invalid.
    """
    given = normalized(config).get("ds_ext")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ValueError(f'ds_ext is {given!r}; allowed: a section, {{"gradient_policy": ...}}.')
    if given.get("sum_group_size") in (None, 0, 1):  # one level of sums, as without the key
        given.pop("sum_group_size", None)
    elif "sum_group_size" in given:
        raise ValueError(
            "ds_ext.sum_group_size was removed: delete it; results and checkpoints do not depend "
            "on it."
        )
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
                f"ds_ext.{key} = {value!r} has no effect under {optimizer}, which is not a ds_ext "
                'optimizer: remove it, or name one, such as "ds_ext.AdamW", in optimizer.type.'
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
    config = normalized(config)
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
            f'{kept_for} needs kept gradients, and ds_ext.gradient_policy = "fused" keeps none: '
            'remove it, and "sharded" is used.'
        )
    if kept and own.gradient_policy == "fused":
        raise ValueError(
            f'{kept[0]} needs kept gradients, and ds_ext.gradient_policy = "fused" keeps none: '
            "remove one of them."
        )
    max_norm = config.get("gradient_clipping")
    dtype = lookup(config, "data_types.grad_accum_dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
        raise ValueError(f"data_types.grad_accum_dtype is {dtype!r}; allowed: fp32, bf16, fp16.")
    return GradientConfig(
        bucket_size=bucket_size(config),
        policy=own.gradient_policy or ("sharded" if kept or kept_for else "fused"),
        max_norm=0.0 if max_norm is None else max_norm,
        max_value=own.clip_value,
        clip_mode=own.clip_mode,
        accumulate_in=None if dtype is None else _DTYPES[dtype],
        measure_updates=monitored if own.measure_updates is None else own.measure_updates,
    )


def log_lines(grad_config: GradientConfig, bucket_size: int, config: dict[str, Any]) -> list[str]:
    """Returns log lines about bucket size and clipping."""
    lines = [f"buckets of {bucket_size:,} gradient elements (zero_optimization.reduce_bucket_size)"]
    if normalized(config).get("gradient_clipping") is None:
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
    size = lookup(normalized(config), "zero_optimization.reduce_bucket_size")
    if size is not None and (type(size) is not int or size < 0):
        raise ValueError(
            f"zero_optimization.reduce_bucket_size is {size!r}; allowed: a whole number >= 0."
        )
    return size
