"""Validates a DeepSpeed config: finds keys that ds_ext refuses or ignores.

The engine raises the first problem. ``python -m ds_ext check`` prints all problems.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from ds_ext.config import parsing
from ds_ext.config.parsing import SIZES, lookup, normalized
from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves
from ds_ext.versions import numbers, written

T = TypeVar("T")
Allowed: TypeAlias = Callable[[Any], bool]
_HPZ = "zero_optimization.zero_hpz_partition_size"


def raise_first(problems: Iterable[str]) -> None:
    """Raises ValueError with the first problem, if there is one."""
    for problem in problems:
        raise ValueError(problem)


def problems(
    config: dict[str, Any],
    version: str | None = None,
    kept_for: str = "",
    states: Iterable[tuple[Any, torch.dtype]] = (),
) -> Iterator[str]:
    """Yields a message for each setting that ds_ext cannot honour. All ranks yield the same.

    Args:
        config: a DeepSpeed config without ``parsing.malformed`` sections.
        version: the version of DeepSpeed; None if DeepSpeed is not installed.
        kept_for: see ``parsing.gradients``.
        states: the rule of each param group with each dtype of weights. Only read if the config
            offloads optimizer states.
    """
    config = normalized(config)
    if version is not None:
        yield from needs_newer_deepspeed(config, version)
    for key, value, advice in _disallowed(config, REFUSED):
        yield f"{key} = {value!r} is not supported: {advice}"
    yield from _combinations(config)
    try:
        parsing.gradients(config, kept_for=kept_for)
    except ValueError as error:
        yield str(error)
    yield from offload_problems(config, states)


def ignored(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each setting that is accepted but has no effect."""
    config = normalized(config)
    for key, value, reason in _disallowed(config, IGNORED):
        yield f"{key} = {value!r} has no effect: {reason}."
    on, (zero, stage) = _offloaded(config), _zero(config)
    device = _device(zero.get("offload_param"))
    if "offload_param" not in on and device != "none":
        yield (
            f'zero_optimization.offload_param.device = "{device}" has no effect: it '
            "moves the partitions that ZeRO-3 makes of parameters, and zero_optimization.stage "
            f"is {stage}."
        )
    for name, section in on.items():
        if unread := [f"{name}.{option}" for option in section if option in _NVME_OPTIONS]:
            yield (
                f'zero_optimization: {", ".join(unread)} have no effect where device is "cpu": '
                "DeepSpeed has them for NVMe and its own CPU optimizer."
            )


def needs_newer_deepspeed(config: dict[str, Any], version: str) -> Iterator[str]:
    """Yields a message for each key that needs a DeepSpeed newer than ``version``."""
    for key, value, since in _disallowed(config, _SINCE):
        if numbers(version) < since:
            yield (
                f"{key} = {value!r} needs DeepSpeed {written(since)} or newer under "
                f"ds_ext, and {version} is installed: upgrade it, or remove the key."
            )


def _disallowed(
    config: dict[str, Any], table: Iterable[tuple[str, Allowed, T]]
) -> Iterator[tuple[str, Any, T]]:
    """Yields (key, value, last column) for each row whose key is set to a disallowed value."""
    for key, is_allowed, last in table:
        value = lookup(config, key)
        if value is not None and not is_allowed(value):
            yield key, value, last


# Mutually exclusive settings.


def _combinations(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each key that needs another ZeRO stage, or excludes another key."""
    zero, stage = "zero_optimization", lookup(config, "zero_optimization.stage")
    size = lookup(config, _HPZ)
    if not _at_most_one(size) and stage != 3:
        yield (
            f"{_HPZ} = {size!r} works only at {zero}.stage 3, and the stage is {stage or 0}: "
            "remove it, or set stage 3."
        )
    if size := lookup(config, "ds_ext.shard_size"):
        asked = f"ds_ext.shard_size = {size!r}"
        if not stage:
            yield f"{asked} needs {zero}.stage 1, 2 or 3, which divide a model: set it."
        yield from _excluded(config, asked, _EXCLUDED_BY_SHARD_SIZE)
    if lookup(config, "ds_ext.weight_storage"):
        yield from int8_problems(config)


def int8_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each setting that excludes weights in 8 bits."""
    yield from _excluded(normalized(config), 'ds_ext.weight_storage = "int8"', _EXCLUDED_BY_INT8)


def _excluded(
    config: dict[str, Any], asked: str, others: Iterable[tuple[str, Allowed]]
) -> Iterator[str]:
    """Yields a message for each other setting that ``asked`` excludes."""
    for key, value, _ in _disallowed(config, ((*other, None) for other in others)):
        yield f"{asked} is not supported together with {key} = {value!r}: remove one of them."


def expert_problems(stage: Any, sequences: bool, tensor_size: Any) -> Iterator[str]:
    """Yields a message if experts cannot be combined with sequence or tensor parallelism.

    Args:
        stage: the ZeRO stage.
        sequences: whether sequence parallelism is used.
        tensor_size: the number of tensor-parallel ranks.
    """
    if sequences and stage == 3:
        yield (
            "zero_optimization.stage = 3: DeepSpeed does not partition the experts of AutoEP where "
            "sequences are divided: use stage 0, 1 or 2, or remove sequence_parallel_size."
        )
    elif sequences and tensor_size > 1:
        yield (
            "DeepSpeed's experts go with tensor_parallel.autotp_size or sequence_parallel_size, "
            "not with both: remove one of them."
        )


# Offload.


def offload_problems(
    config: dict[str, Any], states: Iterable[tuple[Any, torch.dtype]] = ()
) -> Iterator[str]:
    """Yields a message for each offload setting that ds_ext cannot honour; see ``problems``."""
    on = _offloaded(config)
    for name, section in on.items():
        key = f"zero_optimization.{name}"
        if (device := _device(section)) != "cpu":
            yield (
                f'{key}.device = "{device}": ds_ext offloads to the memory of the host, not to '
                'NVMe. Set it to "cpu", or remove it.'
            )
        elif section.get("ratio", 1) != 1:
            yield (
                f"{key}.ratio = {section['ratio']!r} is not supported: it is for DeepSpeed's "
                "own optimizers on the CPU; remove it."
            )
    kinds = list(states) if "offload_optimizer" in on else []
    if kinds and not any(has_state(*kind) for kind in kinds):
        yield (
            'zero_optimization.offload_optimizer.device = "cpu": there is almost no '
            f"optimizer state to offload. With these settings {type(kinds[0][0]).__name__} keeps "
            "at most 4 bytes for each row and column of a matrix: remove offload_optimizer. "
            "offload_param moves weights."
        )


def has_state(rule: Any, dtype: torch.dtype) -> bool:
    """Returns whether a rule keeps more than row and column statistics for a matrix.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``.
        dtype: the dtype of the weights, which may need a master copy.
    """
    parts = leaves(rule.state_spec(Shard.whole((512, 512))))
    masters = weight_update.master(torch.empty(0, dtype=dtype, device="cpu"), rule)
    return bool(masters) or any(not part.is_shared for _, part in parts)


def _zero(config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The section "zero_optimization", and the ZeRO stage."""
    zero = normalized(config).get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    return zero, zero.get("stage") or 0


def _offloaded(config: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The active offload sections by name. ``offload_param`` is active only at ZeRO-3."""
    zero, stage = _zero(config)
    names = ["offload_param", "offload_optimizer"] if stage == 3 else ["offload_optimizer"]
    return {name: zero[name] for name in names if _device(zero.get(name)) != "none"}


def _device(section: Any) -> Any:
    return (section.get("device") if isinstance(section, Mapping) else None) or "none"


# Sizes that must match the number of ranks. DeepSpeed checks them only in a run.


def size_problems(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Yields messages about group sizes and combinations with experts that a run refuses.

    Args:
        config: a DeepSpeed config.
        ranks: the number of data-parallel ranks; None if unknown.
    """
    config = normalized(config)
    for key in group_keys(config) if ranks else ():
        size = lookup(config, key)
        if type(size) is not int or not ranks:
            continue
        if 1 < size < ranks and ranks % size:
            yield f"{key} = {size} does not divide the {ranks} ranks: set it to a divisor."
        elif size > ranks and key == "ds_ext.shard_size":
            yield f"{key} = {size}, but there are {ranks} ranks: set it to a divisor."
    if lookup(config, "expert_parallel.enabled"):
        stage = lookup(config, "zero_optimization.stage")
        sequences = (config.get("sequence_parallel_size") or 1) != 1
        tensor_size = lookup(config, "tensor_parallel.autotp_size") or 1
        yield from expert_problems(stage, sequences, tensor_size)


def group_keys(config: dict[str, Any]) -> list[str]:
    """Returns the keys of a config that set a group size. It must divide the number of ranks."""
    config = normalized(config)
    return [key for key in _GROUP_SIZES if lookup(config, key) not in (None, 0, 1)]


def batch_problems(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Yields a message if batch sizes contradict each other; see ``size_problems``."""
    whole, micro, steps = (normalized(config).get(key) for key in SIZES)
    parts = (ranks or 1) * (micro or 1) * (steps or 1)
    is_open = None in (ranks, micro, steps)  # DeepSpeed derives the missing size
    if whole is not None and (whole % parts if is_open else whole != parts):
        yield (
            f"train_batch_size = {whole} is not train_micro_batch_size_per_gpu = {micro or 'any'} "
            f"times gradient_accumulation_steps = {steps or 'any'} times {ranks or 'any'} ranks."
        )


# The tables. ``is_allowed`` is called with every value except None.


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return bool(value == 1)


def _at_most_one(value: Any) -> bool:
    return not isinstance(value, int) or value <= 1


_REMOVE = "remove it."
_EXACT = "remove it; {} are then exact, and checkpoints load."
_MASTER = (
    'remove it. "weight_update" in optimizer.params says how 16-bit weights are written, with no '
    'copy in fp32 unless it is "master"; data_types.grad_accum_dtype, what gradients are kept in; '
    "statistics are fp32."
)
_ANY = (
    "remove it, and load what engine.save_checkpoint wrote, or a checkpoint of DeepSpeed's AdamW, "
    "as it is: it loads on any number of ranks and at any ZeRO stage without ds_to_universal."
)
_OFFLOAD = (
    'remove it: offload_param and offload_optimizer, each {"device": "cpu"}, replace it, with '
    "pin_memory."
)
_GROUPS = 'remove it: "ds_ext": {"shard_size": n} cuts a model among groups of n ranks.'
_SHARED = "remove it, and save to a file system that all ranks share: each reads parts of all."

# (key, is_allowed, advice)
REFUSED: list[tuple[str, Allowed, str]] = [
    ("zero_optimization.zenflow", _off, _REMOVE),
    ("zero_optimization.offload_optimizer.super_offload", _off, _REMOVE),
    ("zero_optimization.cpu_offload", _off, _OFFLOAD),
    ("zero_optimization.cpu_offload_param", _off, _OFFLOAD),
    ("zero_optimization.zero_quantized_gradients", _off, _EXACT.format("gradients")),
    ("zero_optimization.zero_quantized_weights", _off, _EXACT.format("gathered weights")),
    ("zero_optimization.zero_quantized_nontrainable_weights", _off, _REMOVE),
    ("zero_optimization.mics_shard_size", lambda v: v == -1, _GROUPS),
    ("zero_optimization.mics_hierarchical_params_gather", _off, _REMOVE),
    ("fp16.fp16_master_weights_and_grads", _off, _MASTER),
    ("bf16.bf16_master_weights_and_grads", _off, _MASTER),
    ("bf16.bf16_optimizer_states", _off, _MASTER),
    ("prescale_gradients", _off, _REMOVE),
    ("gradient_predivide_factor", _one, _REMOVE),
    ("expert_parallel.expert_tensor_parallel_size", _one, _REMOVE),
    ("compile.deepcompile", _off, "remove it; engine.compile() compiles the model."),
    ("checkpoint.load_universal", _off, _ANY),
    ("checkpoint.use_node_local_storage", _off, _SHARED),
    ("checkpoint.writer", _off, _REMOVE),
    ("datastates_ckpt", lambda v: v is False, _REMOVE),
    ("nebula.enabled", _off, _REMOVE),
]

# (key, is_allowed, why other values have no effect)
IGNORED: list[tuple[str, Allowed, str]] = [
    (
        "zero_optimization.reduce_scatter",
        bool,
        "ds_ext always reduces each gradient to the rank that steps it",
    ),
    (
        "zero_optimization.ignore_unused_parameters",
        bool,
        "a parameter without a gradient is not stepped, and that is no error",
    ),
    (
        "zero_optimization.cpu_offload_use_pin_memory",
        lambda v: False,
        "pin_memory in offload_param and offload_optimizer replaces it",
    ),
    ("checkpoint.checkpoint_serialization", bool, "DeepSpeed itself does not read it"),
]

# (key, is_allowed in any version, the first DeepSpeed version that supports other values)
_SINCE: list[tuple[str, Allowed, tuple[int, ...]]] = [
    ("tensor_parallel.autotp_size", _at_most_one, (0, 19, 8)),
    ("expert_parallel.enabled", _off, (0, 19, 8)),
    (_HPZ, _at_most_one, (0, 19, 8)),
    ("ds_ext.shard_size", _off, (0, 19, 8)),
    ("managed_gradient_accumulation", lambda v: v is not False, (0, 19, 4)),
]

# (key, is_allowed with ds_ext.shard_size)
_EXCLUDED_BY_SHARD_SIZE: list[tuple[str, Allowed]] = [
    (_HPZ, _one),
    ("tensor_parallel.autotp_size", lambda v: v in (0, 1)),
    ("sequence_parallel_size", _one),
    ("expert_parallel.enabled", _off),
]

# (key, is_allowed with ds_ext.weight_storage)
_EXCLUDED_BY_INT8: list[tuple[str, Allowed]] = [
    ("zero_optimization.offload_optimizer.device", lambda v: v == "none"),
    ("zero_optimization.offload_param.device", lambda v: v == "none"),
    (_HPZ, _at_most_one),
    ("tensor_parallel.autotp_size", _at_most_one),
    ("expert_parallel.enabled", _off),
    ("fp16.enabled", _off),
]

_GROUP_SIZES = ("ds_ext.shard_size", "sequence_parallel_size", _HPZ)

# DeepSpeed reads these options only for NVMe or super_offload.
_NVME_OPTIONS = {
    *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    *("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"),
}
