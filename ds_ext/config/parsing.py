"""Reads DeepSpeed configs as DeepSpeed does, and the settings of them that ds_ext uses.

The engine and the commands ``check`` and ``plan`` share these functions.
"""

import base64
import binascii
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ds_ext import hyperparams
from ds_ext.backward.gradient_config import GradientConfig
from ds_ext.errors import raise_all
from ds_ext.settings import DTYPES, PLACES, SECTION, SETTINGS, SIZES, Section

try:
    import hjson  # installed with DeepSpeed, which allows comments in a file
except ImportError:
    hjson = json

_FILLED_ZERO = (
    *("reduce_bucket_size", "offload_param.device", "offload_optimizer.device"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_prefetch_bucket_size"),
    "stage3_param_persistence_threshold",
)
_FILLED_FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")
# Keys whose "auto" HF Trainer or accelerate replaces, with a value of the type that they write if a
# check needs one.
_FILLED = {
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "zero_optimization.stage": 3,  # accelerate: its zero_stage, by default 2
    **dict.fromkeys((*SIZES, "gradient_clipping", "bf16.enabled", "fp16.enabled"), "auto"),
    **dict.fromkeys(("fp16.min_loss_scale", "amp.enabled", "amp.opt_level"), "auto"),
    **{f"fp16.{key}": "auto" for key in _FILLED_FP16},
    **{f"zero_optimization.{key}": "auto" for key in _FILLED_ZERO},
    "steps_per_print": "auto",
}
_REMOVED = {key for key, setting in SETTINGS.items() if setting.removed}
_ADAPTERS = {key: TypeAdapter(setting.type) for key, setting in SETTINGS.items()}


def load(config: Any) -> Any:
    """Returns the dictionary of a DeepSpeed config; ValueError if a file or its text has none.

    Args:
        config: a dictionary, the path of a file, or a file's text in base 64. Returned as it is if
            it is none of these.
    """
    if not isinstance(config, str | os.PathLike):
        return config
    if isinstance(config, str) and not os.path.exists(config):
        try:
            return parsed(base64.urlsafe_b64decode(config).decode(), "the config in base 64")
        except (binascii.Error, UnicodeDecodeError):
            return config
    try:
        return parsed(Path(config).read_bytes(), str(config))
    except OSError as error:
        raise ValueError(f"{config}: {error.strerror}") from None


def parsed(text: str | bytes, name: str) -> dict[str, Any]:
    """Returns the dictionary of a JSON text; ValueError, which has its ``name``, without one."""
    try:
        found = hjson.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict) or not text.strip():  # hjson reads an empty text as {}
        raise ValueError(f'{name} holds no JSON object such as {{"key": ...}}.')
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dictionary of an object's keys and values; ValueError if a key is there twice."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {key} is there twice")
    return dict(pairs)


def lookup(config: Any, key: str, default: Any = None) -> Any:
    """Returns the value of a dotted key, or ``default`` if it or one of its sections is missing.

    The key "" is the config itself.
    """
    for part in key.split(".") if key else ():
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return config


def edited(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with other values of dotted keys. Creates missing sections."""
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        config = config | {first: edited(config.get(first) or {}, {rest: value}) if rest else value}
    return config


def well_formed(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Reads the values of a config as DeepSpeed does, and finds those of another type.

    Leaves out keys whose value is "auto": like DeepSpeed, ds_ext uses defaults for them. HF Trainer
    and accelerate have already replaced every "auto" that they support. Leaves other
    hyper-parameters and the section "ds_ext" as they are.

    Returns:
        The values, without the sections of wrong ones, and a message for each wrong one. For some
        of these, DeepSpeed itself would fail with an error that does not name the key.
    """
    read: dict[str, Any] = _without_autos(config)
    if isinstance(zero := read.get("zero_optimization"), bool):  # DeepSpeed's old format
        read["zero_optimization"] = {"stage": int(zero)}
    wrong = {}
    for key, setting in SETTINGS.items():
        path, _, last = key.rpartition(".")
        section = lookup(read, path)
        if not isinstance(section, dict):
            continue
        is_needed = setting.is_required or (setting.type is SECTION and last in section)
        if (value := section.get(last)) is None and not is_needed:
            continue
        try:
            section[last] = _ADAPTERS[key].validate_python(value)
        except ValidationError:
            allowed = hyperparams.describe(setting.type)
            wrong[key] = f"{key} is {lookup(config, key)!r}; allowed: {allowed}."
    sections = {key.partition(".")[0] for key in wrong}
    return {key: read[key] for key in read if key not in sections}, list(wrong.values())


def normalized(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config that ``well_formed`` reads."""
    return well_formed(config)[0]


def _without_autos(value: Any, where: str = "") -> Any:
    """A copy of a section and of those inside, without each "auto" that stands for a default."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, own in value.items():
        name = hyperparams.dotted(where, key)
        is_ours = name.startswith(("ds_ext", "optimizer.params")) and name not in _FILLED
        is_section = name in SETTINGS and SETTINGS[name].type is SECTION
        if own != "auto" or is_ours or is_section:
            kept[key] = _without_autos(own, name)
    return kept


def _autos(value: Any, where: str = "") -> Iterator[str]:
    """Yields the dotted keys of a section whose value is "auto"."""
    for key, own in value.items():
        name = hyperparams.dotted(where, key)
        if own == "auto":
            yield name
        elif isinstance(own, dict):
            yield from _autos(own, name)


def never_filled(config: dict[str, Any]) -> list[str]:
    """Returns the keys of DeepSpeed's sections that are "auto" and that no client fills in."""
    ours = ("ds_ext", "optimizer", "scheduler")  # where "auto" is refused
    return [key for key in _autos(config) if key not in _FILLED and not key.startswith(ours)]


def filled(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces "auto" as HF Trainer and accelerate do, by values of the right type.

    Returns:
        A config, in which other keys may stay "auto", and the keys that had "auto" and that HF
        fills in.
    """
    autos = [key for key in _autos(config) if key in _FILLED]
    return edited(config, {key: _FILLED[key] for key in autos}), autos


def section(config: dict[str, Any]) -> Section:
    """Returns the section "ds_ext" of a DeepSpeed config; ValueError with a line per wrong key."""
    values = {} if config.get("ds_ext") is None else config["ds_ext"]
    if not isinstance(values, dict):
        raise ValueError(f'ds_ext is {values!r}; allowed: a section, {{"gradient_policy": ...}}.')
    present = {key: value for key, value in values.items() if f"ds_ext.{key}" not in _REMOVED}
    read, problems = hyperparams.checked(Section, present, "ds_ext", places=PLACES)
    raise_all(problems)
    return Section(**read)


# The values of keys, any other of which needs kept gradients.
_IF_NOT_KEPT = {"gradient_accumulation_steps": 1, "managed_gradient_accumulation": True}


def gradients(
    config: dict[str, Any], monitored: bool = False, kept_for: str = ""
) -> GradientConfig:
    """Returns a config's settings of gradients; ValueError if two keys contradict each other.

    Args:
        config: a ``normalized`` DeepSpeed config.
        monitored: whether a DeepSpeed monitor is enabled.
        kept_for: a feature without a config key that needs kept gradients; "" if there is none.
    """
    own = section(config)
    for key, not_kept in _IF_NOT_KEPT.items():
        if not kept_for and (value := config.get(key, not_kept)) != not_kept:
            kept_for = f"{key} = {value!r}"
    if kept_for and own.gradient_policy == "fused":
        raise ValueError(
            f'{kept_for} needs kept gradients, and ds_ext.gradient_policy = "fused" keeps none: '
            "remove one of them."
        )
    dtype = lookup(config, "data_types.grad_accum_dtype")
    return GradientConfig(
        bucket_size=lookup(config, "zero_optimization.reduce_bucket_size"),
        policy=own.gradient_policy or ("sharded" if kept_for else "fused"),
        max_norm=config.get("gradient_clipping") or 0.0,
        max_value=own.clip_value,
        clip_mode=own.clip_mode,
        accumulate_in=None if dtype is None else getattr(torch, DTYPES[dtype]),
        measure_updates=monitored if own.measure_updates is None else own.measure_updates,
    )


def log_lines(grad_config: GradientConfig, bucket_size: int, config: dict[str, Any]) -> list[str]:
    """Returns log lines about bucket size and clipping of a ``normalized`` config."""
    by = "the default of " if grad_config.bucket_size is None else ""
    by += "zero_optimization.reduce_bucket_size"
    lines = [f"buckets of {bucket_size:,} gradient elements ({by})"]
    if config.get("gradient_clipping") is None:
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
