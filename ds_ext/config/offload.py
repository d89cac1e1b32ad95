"""What a config asks of offload: what can be done of it, and what is refused, by name."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves

# What the sections may hold when they are on, and the values that mean nothing then.
_INERT: dict[str, dict[str, Any]] = {
    "offload_param": {},
    "offload_optimizer": {
        "ratio": 1,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "super_offload": False,
    },
}


def check(config: Mapping[str, Any], rules: Iterable[Any], dtypes: Iterable[torch.dtype]) -> None:
    """Checks what a config asks to be offloaded.

    Args:
        config: a DeepSpeed config.
        rules: those of the optimizer's groups, read only if states are to be offloaded.
        dtypes: those of its parameters.

    Raises:
        ValueError: it cannot be offloaded, or nothing would be moved.
    """
    zero = config.get("zero_optimization") or {}
    on = {name for name in _INERT if _is_on(f"zero_optimization.{name}", zero.get(name), name)}
    if "offload_param" in on and zero.get("stage") != 3:
        raise ValueError(
            'zero_optimization.offload_param.device = "cpu" moves the partitions that ZeRO-3 makes '
            f"of parameters, and zero_optimization.stage is {zero.get('stage', 0)}: set it to 3, "
            "or remove offload_param."
        )
    if "offload_optimizer" not in on:
        return
    kinds = [(rule, dtype) for rule in rules for dtype in dtypes]
    if kinds and not any(has_state(*kind) for kind in kinds):
        raise ValueError(
            'zero_optimization.offload_optimizer.device = "cpu": there is next to nothing to '
            f"offload, for {type(kinds[0][0]).__name__} as it is set up keeps at most 4 bytes for "
            "each row and column of a matrix: remove offload_optimizer. offload_param moves "
            "weights."
        )


def _is_on(key: str, section: Mapping[str, Any] | None, name: str) -> bool:
    """Whether a section asks for offload; ValueError for what it asks for and cannot have."""
    device = (section or {}).get("device") or "none"
    if section is None or device == "none":
        return False
    if device != "cpu":
        raise ValueError(
            f'{key}.device = "{device}": ds_ext offloads to the memory of the host, not to NVMe. '
            'Set it to "cpu", or remove it.'
        )
    for option, value in section.items():
        inert = _INERT[name].get(option)
        if option not in ("device", "pin_memory") and (inert is None or value != inert):
            raise ValueError(
                f"ds_ext cannot honour {key}.{option} = {value!r}: it is for NVMe, or for "
                "DeepSpeed's own optimizers on the CPU; remove it."
            )
    return True


def has_state(rule: Any, dtype: torch.dtype) -> bool:
    """Whether a rule, or the writing of weights, keeps more of a matrix than statistics of it."""
    parts = leaves(rule.keeps(Shard.whole((512, 512))))
    masters = weight_update.master(torch.empty(0, dtype=dtype, device="cpu"), rule)
    return bool(masters) or any(not part.is_shared for _, part in parts)
