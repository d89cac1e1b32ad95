"""What DeepSpeed itself would say of a config, asked before there is an engine."""

import difflib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import constants, lr_schedules, precision_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger
from pydantic import BaseModel, ValidationError
from torch.optim import Optimizer, lr_scheduler

from ds_ext.config.refused import lookup, without_auto
from ds_ext.engine import names, refusals, versions
from ds_ext.optimizer import RuleOptimizer

# Top-level keys that no constant of DeepSpeed's two modules names.
_SECTIONS = {
    *("zero_optimization", "sparse_gradients", "amp", "pipeline"),
    *("sequence_parallel_size", "data_parallel_size"),
    *("flops_profiler", "activation_checkpointing", "data_efficiency", "compression_training"),
    *("monitor_config", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger"),
    *("elasticity", "autotuning", "aio", "nebula", "datastates_ckpt", "hybrid_engine", "compile"),
    *("timers", "tensor_parallel", "expert_parallel", "weight_quantization", "zenflow"),
    *("progressive_layer_drop", "eigenvalue", "quantize_training", "sparse_attention"),
    "ds_ext",
}
_GROUPS = (
    *("ds_ext.shard_size", "ds_ext.sum_group_size", "sequence_parallel_size"),
    "zero_optimization.zero_hpz_partition_size",
)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Sections whose keys DeepSpeed checks by a model of pydantic's.
_MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
}


def whose(optimizer_type: str) -> str | None:
    """Returns the key of our optimizer that a config's "type" means, None if it is not ours.

    Raises:
        ValueError: nobody has an optimizer of that name.
    """
    lower = optimizer_type.lower()  # as DeepSpeed makes it if it knows it
    known = lower in deepspeed_config.DEEPSPEED_OPTIMIZERS
    names.refuse_unknown(lower if known else optimizer_type)
    return names.ours(lower)


def problems(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Yields what DeepSpeed would refuse of a config, or ignore, each in words.

    All unknown keys and all wrong values of ZeRO's and the 16-bit sections; of the rest the first
    that DeepSpeed meets, if these are right.

    Args:
        config: a DeepSpeed config, without values that HF is to fill in.
        ranks: how many ranks of data parallelism there are to be; None: not known.
    """
    found = [*_unknown(config), *versions.lacking(config)]
    for section, model in _MODELS.items():
        given = config.get(section)
        if isinstance(given, dict):
            found += _wrong(section, model, given)
    for key in _SIZES:
        size = config.get(key)
        if size is not None and (type(size) is not int or size < 1):
            found.append(f"{key} is {size!r}; allowed: a whole number > 0.")
    found += _groups(config, ranks) if ranks else []
    found += _experts(config)
    yield from found or [*_batches(config, ranks), *_refused(config)]


def _unknown(config: dict[str, Any]) -> Iterator[str]:
    """Top-level keys that DeepSpeed does not read."""
    modules = (constants, deepspeed_config)
    values = [value for module in modules for value in vars(module).values()]
    known = {v for v in values if isinstance(v, str) and v.isidentifier()} | _SECTIONS
    for key in config:
        if key not in known:
            yield f"unknown key {key}, which DeepSpeed would ignore.{_guess(key, known)}"


def _guess(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def _wrong(section: str, model: type[BaseModel], given: dict[str, Any]) -> Iterator[str]:
    """What a section's model does not accept."""
    try:
        model(**given)
    except ValidationError as error:
        yield from in_words(error)
    except (AssertionError, TypeError, ValueError) as error:
        yield f"{section}: {error}"


def in_words(error: ValidationError) -> Iterator[str]:
    """Yields, for each key that is wrong, what pydantic says of it and the nearest known one."""
    sections = {model.__name__: (section, model) for section, model in _MODELS.items()}
    section, model = sections.get(error.title, (error.title, BaseModel))
    for one in error.errors(include_url=False):
        key = ".".join(map(str, (section, *one["loc"])))
        if one["type"] == "extra_forbidden":
            known = model.model_fields if len(one["loc"]) == 1 else ()
            yield f"unknown key {key}.{_guess(str(one['loc'][-1]), known)}"
        elif one["type"] == "enum":  # names of one value are told as several
            allowed = dict.fromkeys(re.split(", | or ", one["ctx"]["expected"]))
            yield f"{key} is {one['input']!r}; allowed: {', '.join(allowed)}."
        else:
            yield f"{key} is {one['input']!r}: {one['msg'][0].lower()}{one['msg'][1:]}."


def _experts(config: dict[str, Any]) -> Iterator[str]:
    """Experts of AutoEP beside sequences that are divided."""
    config = without_auto(config)
    if lookup(config, "expert_parallel.enabled"):
        stage = lookup(config, "zero_optimization.stage")
        sequences = (config.get("sequence_parallel_size") or 1) != 1
        tensor_size = lookup(config, "tensor_parallel.autotp_size") or 1
        try:
            refusals.refuse_divided_sequences(stage, sequences, tensor_size)
        except ValueError as error:
            yield str(error)


def _batches(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Batch sizes that contradict each other, as DeepSpeed multiplies them."""
    whole, micro, steps = (config.get(key) for key in _SIZES)
    parts = (ranks or 1) * (micro or 1) * (steps or 1)
    is_open = None in (ranks, micro, steps)  # one of them follows from the others
    if whole is not None and (whole % parts if is_open else whole != parts):
        yield (
            f"train_batch_size = {whole} is not train_micro_batch_size_per_gpu = {micro or 'any'} "
            f"times gradient_accumulation_steps = {steps or 'any'} times {ranks or 'any'} ranks."
        )


def unknown_ranks(config: dict[str, Any]) -> list[str]:
    """Returns the keys of a config that a number of ranks has to fit."""
    sizes = ((key, lookup(config, key)) for key in _GROUPS)
    return [key for key, size in sizes if type(size) is int and size > 1]


def _groups(config: dict[str, Any], ranks: int) -> Iterator[str]:
    """Sizes of groups that do not divide the number of ranks."""
    for key in unknown_ranks(config):
        size = lookup(config, key)
        if size < ranks and ranks % size:
            yield f"{key} = {size} does not divide the {ranks} ranks: set it to a divisor."
        elif size > ranks and key == "ds_ext.shard_size":
            yield f"{key} = {size}, but there are {ranks} ranks: set it to a divisor."


def schedule(config: dict[str, Any], optimizer: Optimizer) -> Iterator[str]:
    """Yields what is wrong with the scheduler that a config names.

    Args:
        config: a DeepSpeed config, without values that HF is to fill in.
        optimizer: to be scheduled; its learning rates are changed.
    """
    section = config.get("scheduler")
    if section is None:
        return
    name = section.get("type") if isinstance(section, dict) else None
    if not isinstance(name, str):
        yield f'scheduler is {section!r}; allowed: {{"type": ..., "params": ...}}.'
        return
    own = {n: getattr(lr_schedules, n) for n in lr_schedules.VALID_LR_SCHEDULES}
    torchs = {n: k for n, k in vars(lr_scheduler).items() if isinstance(k, type) and n[0] != "_"}
    kind, params = {**torchs, **own}.get(name), section.get("params") or {}
    if kind is None:
        known = _guess(name, [*own, *torchs])
        yield (
            f"scheduler.type is {name!r}, a scheduler neither of DeepSpeed nor of torch.{known} "
            f"DeepSpeed's: {', '.join(own)}."
        )
        return
    with _quiet():
        try:
            if isinstance(optimizer, RuleOptimizer):
                refusals.refuse_schedule(optimizer)
            made = kind(optimizer, **params)
            if isinstance(optimizer, RuleOptimizer):
                refusals.check_betas(made, optimizer)
        except ValueError as error:
            yield str(error)
        except Exception as error:  # wrong names and types of arguments
            yield f"scheduler.params: {name} refuses them: {error}"


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed's logger tells errors alone within the context."""
    level, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.level = level


def with_advice(message: str) -> str:
    """Returns what DeepSpeed says of a key that it has removed, and what does the same here."""
    if "zero_optimization.mics_" in message:
        return (
            f"{message.rstrip('.')}; the optimizers of ds_ext cut a model among groups of n ranks "
            'by "ds_ext": {"shard_size": n}.'
        )
    return message


def _refused(config: dict[str, Any]) -> Iterator[str]:
    """What DeepSpeed raises when it reads a config; it takes this process for the only rank."""
    own = {k: v for k, v in config.items() if k not in _SIZES} | {_SIZES[1]: 1}
    with _quiet():  # it tells of what it reads
        try:
            deepspeed_config.DeepSpeedConfig(own)
        except Exception as error:  # assertions, and what wrong types lead to
            yield f"DeepSpeed refuses the config: {error or type(error).__name__}"
