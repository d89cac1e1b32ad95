"""Settings of a DeepSpeed config that are refused by name, or accepted though they do nothing."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def refuse(config: dict[str, Any]) -> None:
    """Raises ValueError, on every rank alike, naming the first setting that cannot be honoured."""
    for problem in problems(config):
        raise ValueError(problem)


def problems(config: dict[str, Any]) -> Iterator[str]:
    """Yields each setting that cannot be honoured: its key and value, and what to do."""
    config = without_auto(config)
    for key, honoured, advice in _HONOURED:
        value = lookup(config, key)
        if value is not None and not honoured(value):
            yield f"ds_ext cannot honour {key} = {value!r} yet: {advice}"
    copies = lookup(config, "zero_optimization.zero_hpz_partition_size")
    stage = lookup(config, "zero_optimization.stage")
    if _above_one(copies) and stage != 3:
        yield (
            f"zero_optimization.zero_hpz_partition_size = {copies} copies what stage 3 partitions, "
            f"but zero_optimization.stage is {stage}: remove it."
        )
    if lookup(config, "zero_optimization.zero_quantized_weights"):
        yield from _of_quantized_weights(stage, copies)
    if lookup(config, "zero_optimization.zero_quantized_gradients"):
        yield from _of_quantized_gradients(config, stage)
    if not stage and (size := lookup(config, "ds_ext.sum_group_size")):
        yield (
            f"ds_ext.sum_group_size = {size!r}: at zero_optimization.stage {stage or 0} ranks add "
            "up no sums of rules: remove it."
        )
    if size := lookup(config, "ds_ext.shard_size"):
        yield from _of_groups(config, size, stage)


def without_effect(config: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each setting that is accepted and changes nothing: its value, and why."""
    for key, is_told, reason in _WITHOUT_EFFECT:
        value = lookup(config, key)
        if value is not None and is_told(value):
            yield f"{key} = {value!r} has no effect: {reason}."


def _of_quantized_weights(stage: Any, copies: Any) -> Iterator[str]:
    """What 8-bit weights cannot be had with; how many ranks hold a second copy."""
    key = "zero_optimization.zero_quantized_weights"
    if stage != 3:
        yield (
            f"{key} = True is of what stage 3 gathers, but zero_optimization.stage is {stage}: "
            "remove it."
        )
    elif _above_one(copies):
        yield (
            f"ds_ext cannot honour {key} = True together with "
            f"zero_optimization.zero_hpz_partition_size = {copies} yet: remove one of them."
        )


def _of_quantized_gradients(config: dict[str, Any], stage: Any) -> Iterator[str]:
    """What sums of gradients in 4 bits cannot be had with."""
    asked = "zero_optimization.zero_quantized_gradients = True"
    if stage != 3:
        yield f"{asked} needs zero_optimization.stage 3, but it is {stage}: remove it."
    yield from _of_others(config, asked, [("ds_ext.shard_size", _off), *_WITHOUT_GROUPS[1:]])


def _of_groups(config: dict[str, Any], size: Any, stage: Any) -> Iterator[str]:
    """What cannot be had together with groups of ranks that hold copies."""
    asked = f"ds_ext.shard_size = {size!r}"
    if not stage:
        yield f"{asked} needs zero_optimization.stage 1, 2 or 3, for nothing is cut: set it."
    yield from _of_others(config, asked, _WITHOUT_GROUPS)


def _of_others(
    config: dict[str, Any], asked: str, others: Iterable[tuple[str, Callable[[Any], bool]]]
) -> Iterator[str]:
    """Which of other settings, with what each may be, a setting cannot be had together with."""
    for key, is_fine in others:
        value = lookup(config, key)
        if value is not None and not is_fine(value):
            yield f"ds_ext cannot honour {asked} together with {key} = {value!r} yet: remove one."


def _off(value: Any) -> bool:
    return not value


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _one(value: Any) -> bool:
    return bool(value == 1)


_REMOVE = "remove it."
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

# (key, what of it goes together with groups of ranks that hold copies)
_WITHOUT_GROUPS = [
    ("zero_optimization.zero_hpz_partition_size", _one),
    ("tensor_parallel.autotp_size", lambda v: v in (0, 1)),
    ("sequence_parallel_size", _one),
    ("expert_parallel.enabled", _off),
]

# (key, what is honoured, what to do otherwise)
_HONOURED = [
    ("zero_optimization.zenflow", _off, _REMOVE),
    ("zero_optimization.offload_optimizer.super_offload", _off, _REMOVE),
    ("zero_optimization.cpu_offload", _off, _OFFLOAD),
    ("zero_optimization.cpu_offload_param", _off, _OFFLOAD),
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
]

# (key, which values are told of, why they change nothing)
_WITHOUT_EFFECT = [
    (
        "zero_optimization.reduce_scatter",
        _off,
        "each rank receives the sum of the gradients that it steps by, whichever collective adds",
    ),
    (
        "zero_optimization.ignore_unused_parameters",
        _off,
        "a parameter without a gradient is not stepped, and that is no error",
    ),
    (
        "zero_optimization.cpu_offload_use_pin_memory",
        lambda v: True,
        "pin_memory in offload_param and offload_optimizer replaces it",
    ),
    ("checkpoint.checkpoint_serialization", _off, "DeepSpeed itself does not read it"),
]


def lookup(config: Any, key: str) -> Any:
    """The value of a dotted key; None where a section on the way is missing."""
    for part in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(part)
    return config


def without_auto(config: Any) -> Any:
    """Returns a config without the keys whose value is "auto", in all its sections.

    DeepSpeed drops them in the same way, and uses its defaults. Every reader of a config calls this
    first. HF Trainer and accelerate have replaced the "auto" that they know by then.
    """
    if not isinstance(config, dict):
        return config
    return {key: without_auto(value) for key, value in config.items() if value != "auto"}
