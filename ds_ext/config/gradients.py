"""What a DeepSpeed config says of gradients: read, checked, and told in the log."""

import math
from typing import Any

import torch

from ds_ext import hyperparams
from ds_ext.backward.settings import BUCKET_SIZE, Gradients, Section
from ds_ext.config.refused import lookup, without_auto

_DTYPES = {  # as DeepSpeed spells them
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}


def section_of(config: dict[str, Any]) -> Section:
    """The section "ds_ext" of a DeepSpeed config, checked."""
    given = without_auto(config.get("ds_ext")) or {}
    if not isinstance(given, dict):
        raise ValueError(f'ds_ext is {given!r}; allowed: a section, {{"gradient_policy": ...}}.')
    return Section(**hyperparams.check(Section, given, "ds_ext"))


def read(config: dict[str, Any], monitored: bool = False, keeps: str = "") -> Gradients:
    """What a DeepSpeed config, of which a monitor may be on, says of gradients.

    ``keeps`` names what beside the config needs them to be kept, if anything does.
    """
    config = without_auto(config)
    section = section_of(config)
    kept = [
        f"{key} = {value!r}"
        for key, honoured in (
            ("gradient_accumulation_steps", 1),
            ("managed_gradient_accumulation", True),
        )
        if (value := config.get(key, honoured)) != honoured
    ]
    if keeps and section.gradient_policy == "fused":
        raise ValueError(
            f'ds_ext.gradient_policy = "fused" keeps no gradients, as {keeps} needs: remove it, '
            'and "sharded" is used.'
        )
    if kept and section.gradient_policy == "fused":
        raise ValueError(
            f'ds_ext.gradient_policy = "fused" keeps no gradients, as {kept[0]} needs: remove one.'
        )
    max_norm = config.get("gradient_clipping") or 0.0
    if not isinstance(max_norm, int | float) or not 0 <= max_norm < math.inf:
        raise ValueError(f"gradient_clipping is {max_norm!r}; allowed: a number >= 0.")
    dtype = lookup(config, "data_types.grad_accum_dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
        raise ValueError(f"data_types.grad_accum_dtype is {dtype!r}; allowed: fp32, bf16, fp16.")
    return Gradients(
        bucket_size=bucket_size(config),
        policy=section.gradient_policy or ("sharded" if kept or keeps else "fused"),
        max_norm=float(max_norm),
        max_value=section.clip_value,
        clip_mode=section.clip_mode,
        accumulate_in=None if dtype is None else _DTYPES[dtype],
        measure_updates=monitored if section.measure_updates is None else section.measure_updates,
    )


def report(how: Gradients, config: dict[str, Any]) -> list[str]:
    """What the log says of how gradients are treated."""
    lines = [
        f"buckets of {how.bucket_size:,} gradient elements (zero_optimization.reduce_bucket_size)"
    ]
    if without_auto(config).get("gradient_clipping") is None:
        lines.append(
            "gradient_clipping is not set: nothing is clipped (DeepSpeed's own optimizers would "
            'clip at its default, 1.0). Write "gradient_clipping": 0 to say so.'
        )
    elif how.max_norm:
        cost = {"exact": "exactly, by running backward twice", "previous": "approximately"}
        way = (
            "exactly, by scaling the kept ones" if how.policy == "sharded" else cost[how.clip_mode]
        )
        lines.append(
            f"gradients are clipped to a norm of {how.max_norm:g}, {way}. AdaLomo, Adafactor and "
            "CAME bound the RMS of each update anyway: gradient_clipping = 0 costs nothing."
        )
    return lines


def bucket_size(config: dict[str, Any]) -> int:
    """Gradient elements in flight: ``zero_optimization.reduce_bucket_size``, or our default."""
    size = lookup(without_auto(config), "zero_optimization.reduce_bucket_size")
    if size is None:
        return BUCKET_SIZE
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise ValueError(
            f"zero_optimization.reduce_bucket_size is {size!r}; allowed: a number of elements >= 0."
        )
    return int(size)
