"""What a config asks of offload: what can be done, what is refused by name, what has no effect."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ds_ext.config.refused import without_auto
from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves

_SECTIONS = ("offload_param", "offload_optimizer")
# Options of DeepSpeed's own CPU optimizer, and the values that leave them off.
_OFF = {"ratio": 1, "super_offload": False}
# Options that DeepSpeed reads only where the device is NVMe, or beside super_offload.
_UNREAD = {
    *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    *("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"),
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
    on = _sections_on(config)
    for name, section in on.items():
        _check_section(f"zero_optimization.{name}", section)
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


def without_effect(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for what a config asks of offload that is accepted and changes nothing."""
    on, (zero, stage) = _sections_on(config), _zero(config)
    section = zero.get("offload_param")
    if "offload_param" not in on and _device(section) != "none":
        yield (
            f'zero_optimization.offload_param.device = "{_device(section)}" has no effect: it '
            "moves the partitions that ZeRO-3 makes of parameters, and zero_optimization.stage "
            f"is {stage}."
        )
    for name, section in on.items():
        if unread := [f"{name}.{option}" for option in section if option in _UNREAD]:
            yield (
                f'zero_optimization: {", ".join(unread)} have no effect where device is "cpu": '
                "DeepSpeed has them for NVMe and its own CPU optimizer."
            )


def _zero(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """The section of ZeRO, and its stage."""
    zero = without_auto(config.get("zero_optimization"))
    zero = zero if isinstance(zero, Mapping) else {}
    return zero, zero.get("stage") or 0


def _sections_on(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The sections that move something, by name: parameters only move where ZeRO-3 cuts them."""
    zero, stage = _zero(config)
    names = _SECTIONS if stage == 3 else _SECTIONS[1:]
    return {name: zero[name] for name in names if _device(zero.get(name)) != "none"}


def _device(section: Any) -> Any:
    return (section.get("device") if isinstance(section, Mapping) else None) or "none"


def _check_section(key: str, section: Mapping[str, Any]) -> None:
    """Raises ValueError for what a section asks for and cannot have."""
    if (device := _device(section)) != "cpu":
        raise ValueError(
            f'{key}.device = "{device}": ds_ext offloads to the memory of the host, not to NVMe. '
            'Set it to "cpu", or remove it.'
        )
    for option, value in section.items():
        if option in _OFF and value != _OFF[option]:
            raise ValueError(
                f"ds_ext cannot honour {key}.{option} = {value!r}: it is for DeepSpeed's own "
                "optimizers on the CPU; remove it."
            )


def has_state(rule: Any, dtype: torch.dtype) -> bool:
    """Whether a rule, or the writing of weights, keeps more of a matrix than statistics of it."""
    parts = leaves(rule.keeps(Shard.whole((512, 512))))
    masters = weight_update.master(torch.empty(0, dtype=dtype, device="cpu"), rule)
    return bool(masters) or any(not part.is_shared for _, part in parts)
