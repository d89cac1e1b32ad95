"""Finds all problems of a config without an engine, DeepSpeed's own included."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime import constants, precision_config
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError

from ds_ext.config import config_checks
from ds_ext.config.config_checks import Named, named_optimizer, raise_first
from ds_ext.config.optimizer_names import did_you_mean, misspells_section
from ds_ext.config.parsing import filled, malformed, normalized
from ds_ext.engine import deepspeed_versions, rank_logging, schedulers
from ds_ext.settings import SETTINGS, SIZES

# Top-level keys that neither ``SETTINGS`` nor constants of DeepSpeed's modules name.
_SECTIONS = {
    *("sparse_gradients", "amp", "data_parallel_size", "compression_training", "elasticity"),
    *("monitor_config", "tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "aio"),
    *("timers", "zenflow", "progressive_layer_drop", "eigenvalue", "quantize_training"),
    "sparse_attention",
}
# Sections that DeepSpeed validates with a pydantic model.
_MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
}


def problems(config: dict[str, Any], named: Named) -> list[str]:
    """Returns the messages with which a run refuses a config, for any number of ranks.

    Errors that only DeepSpeed's constructor finds are left out; see ``translated``.

    Args:
        config: a DeepSpeed config without ``malformed`` values and without "auto".
        named: the optimizer that it names.
    """
    found = config_checks.all_problems(config, named, deepspeed_versions.INSTALLED)
    for section, model in _MODELS.items():
        if isinstance(values := config.get(section), dict):
            found += _wrong(section, model, values)
    if not named.problems:
        found += schedulers.problems(config, named.ours)
    return list(dict.fromkeys(found))


def read(make: Callable[[], None], made: DeepSpeedConfig, config: dict[str, Any]) -> None:
    """Lets DeepSpeed read a config that concerns ds_ext.

    Args:
        make: DeepSpeed's constructor of ``made``.
        made: DeepSpeed's object.
        config: the config. Values may be "auto", which a client fills in later.

    Raises:
        ValueError: the config has problems. The message has a line for each.
    """
    autos = [key for key in SIZES if config.get(key) == "auto"]
    found = [
        f'{key} is "auto", which is filled in by HF Trainer and accelerate only: write a number.'
        for key in autos
    ]
    values = filled(config)[0]
    found += malformed(values)
    if not found:
        values = normalized(values)
        found = problems(values, named_optimizer(values))
    if found:
        raise ValueError("\n".join(found))
    refused: ValueError | None = None
    try:
        with translated():
            make()
    except ValueError as error:
        refused = error
    if refused is not None:
        raise_first(config_checks.batch_problems(config, getattr(made, "world_size", None)))
        raise refused
    # Not of ``made.world_size``, which DeepSpeed has divided by sequence_parallel_size.
    ranks = dist.get_world_size() if dist.is_initialized() else None
    raise_first(config_checks.size_problems(config, ranks))


def raised(config: dict[str, Any]) -> Iterator[str]:
    """Yields the error that DeepSpeed raises when it reads a config without ``problems``.

    Leaves out batch sizes, because DeepSpeed would check them for a single rank.
    """
    own = {k: v for k, v in config.items() if k not in SIZES} | {SIZES[1]: 1}
    make = inspect.unwrap(DeepSpeedConfig.__init__)  # ours would check it again, for one rank
    with rank_logging.quiet():
        try:
            with translated():
                make(object.__new__(DeepSpeedConfig), own)
        except ValueError as error:
            yield str(error)


def unknown(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each top-level key that DeepSpeed does not read."""
    modules = (constants, runtime_config)
    values = [value for module in modules for value in vars(module).values()]
    known = {v for v in values if isinstance(v, str) and v.isidentifier()} | _SECTIONS
    known |= {key.partition(".")[0] for key in SETTINGS}
    for key in config:
        if key not in known and not misspells_section(key):
            yield f"unknown key {key}, which DeepSpeed ignores.{did_you_mean(key, known)}"


def _wrong(section: str, model: type[BaseModel], values: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each value that a section's pydantic model rejects."""
    try:
        model(**values)
    except ValidationError as error:
        yield from _sentences(error)
    except (AssertionError, TypeError, ValueError) as error:
        yield f"{section}: {error}"


def _sentences(error: ValidationError) -> Iterator[str]:
    """Yields a readable sentence for each pydantic error, with the closest known key."""
    sections = {model.__name__: (section, model) for section, model in _MODELS.items()}
    section, model = sections.get(error.title, (error.title, BaseModel))
    for one in error.errors(include_url=False):
        key = ".".join(map(str, (section, *one["loc"])))
        if one["type"] == "extra_forbidden" and key in SETTINGS:
            continue  # older versions of DeepSpeed have it, and ds_ext refuses it by its name
        if one["type"] == "extra_forbidden":
            known = model.model_fields if len(one["loc"]) == 1 else ()
            yield f"unknown key {key}.{did_you_mean(str(one['loc'][-1]), known)}"
        elif one["type"] == "enum":  # pydantic repeats aliases of a value
            allowed = dict.fromkeys(re.split(", | or ", one["ctx"]["expected"]))
            yield f"{key} is {one['input']!r}; allowed: {', '.join(allowed)}."
        else:
            yield f"{key} is {one['input']!r}: {one['msg'][0].lower()}{one['msg'][1:]}."


@contextmanager
def translated() -> Iterator[None]:
    """Context in which DeepSpeed reads a config: its errors become a ValueError that says so."""
    try:
        yield
    except ValidationError as error:
        raise ValueError("\n".join(_sentences(error))) from None
    except (DeepSpeedConfigError, AssertionError, AttributeError, KeyError, TypeError) as error:
        message = f"DeepSpeed refuses the config: {error or type(error).__name__}"
        raise ValueError(message) from error
