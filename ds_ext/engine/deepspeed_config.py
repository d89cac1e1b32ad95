"""Finds the problems that DeepSpeed itself has with a config, without an engine."""

import difflib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime import config as runtime_config
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger
from pydantic import BaseModel, ValidationError

from ds_ext.config.config_checks import batch_problems, size_problems
from ds_ext.config.parsing import SIZES, malformed

# Top-level keys that DeepSpeed's modules ``constants`` and ``config`` do not define as constants.
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
# Sections that DeepSpeed validates with a pydantic model.
_MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
}


def problems(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Yields a message for each setting that DeepSpeed would refuse or ignore.

    Finds all unknown keys, and all wrong values in the ZeRO, fp16 and bf16 sections. If there are
    none, it also yields the first error that DeepSpeed raises while it reads the config.

    Args:
        config: a DeepSpeed config without "auto" values, which HF would fill in.
        ranks: the number of data-parallel ranks; None if unknown.
    """
    found = [*malformed(config), *_unknown(config)]
    for section, model in _MODELS.items():
        given = config.get(section)
        if isinstance(given, dict):
            found += _wrong(section, model, given)
    found += size_problems(config, ranks)
    yield from found or [*batch_problems(config, ranks), *_raised(config)]


def _unknown(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each top-level key that DeepSpeed does not read."""
    modules = (constants, runtime_config)
    values = [value for module in modules for value in vars(module).values()]
    known = {v for v in values if isinstance(v, str) and v.isidentifier()} | _SECTIONS
    for key in config:
        if key not in known:
            yield f"unknown key {key}, which DeepSpeed would ignore.{did_you_mean(key, known)}"


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the closest known key, or "" if none is close."""
    near = difflib.get_close_matches(key, known, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def _wrong(section: str, model: type[BaseModel], given: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each value that a section's pydantic model rejects."""
    try:
        model(**given)
    except ValidationError as error:
        yield from format_errors(error)
    except (AssertionError, TypeError, ValueError) as error:
        yield f"{section}: {error}"


def format_errors(error: ValidationError) -> Iterator[str]:
    """Yields a readable sentence for each pydantic error, with the closest known key."""
    sections = {model.__name__: (section, model) for section, model in _MODELS.items()}
    section, model = sections.get(error.title, (error.title, BaseModel))
    for one in error.errors(include_url=False):
        key = ".".join(map(str, (section, *one["loc"])))
        if one["type"] == "extra_forbidden":
            known = model.model_fields if len(one["loc"]) == 1 else ()
            yield f"unknown key {key}.{did_you_mean(str(one['loc'][-1]), known)}"
        elif one["type"] == "enum":  # pydantic repeats aliases of a value
            allowed = dict.fromkeys(re.split(", | or ", one["ctx"]["expected"]))
            yield f"{key} is {one['input']!r}; allowed: {', '.join(allowed)}."
        else:
            yield f"{key} is {one['input']!r}: {one['msg'][0].lower()}{one['msg'][1:]}."


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which DeepSpeed's logger shows only errors."""
    level, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.level = level


def with_advice(message: str) -> str:
    """Returns DeepSpeed's message. For a removed key, adds the ds_ext setting that replaces it."""
    if "zero_optimization.mics_" in message:
        return (
            f"{message.rstrip('.')}; to shard the model within groups of n ranks with an optimizer "
            'of ds_ext, set "ds_ext": {"shard_size": n}.'
        )
    return message


def _raised(config: dict[str, Any]) -> Iterator[str]:
    """Yields the error that DeepSpeed raises when it reads a config.

    Leaves out batch sizes, because DeepSpeed would check them for a single rank.
    """
    own = {k: v for k, v in config.items() if k not in SIZES} | {SIZES[1]: 1}
    with quiet():
        try:
            runtime_config.DeepSpeedConfig(own)
        except ValueError as error:  # as in a run
            yield str(error)
        except Exception as error:  # such as an assertion
            yield refusal(error)


def refusal(error: Exception) -> str:
    """Returns the message about an error of DeepSpeed while it reads a config."""
    return f"DeepSpeed refuses the config: {error or type(error).__name__}"
