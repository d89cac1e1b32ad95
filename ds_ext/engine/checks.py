"""What DeepSpeed itself would say of a config, asked before there is an engine."""

import difflib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger
from pydantic import BaseModel, ValidationError

from ds_ext.engine import names, versions

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
        else:
            yield f"{key} is {one['input']!r}: {one['msg'][0].lower()}{one['msg'][1:]}."


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
    level, logger.level = logger.level, logging.ERROR  # it tells of what it reads
    try:
        deepspeed_config.DeepSpeedConfig(own)
    except Exception as error:  # assertions, and what wrong types lead to
        yield f"DeepSpeed refuses the config: {error or type(error).__name__}"
    finally:
        logger.level = level
