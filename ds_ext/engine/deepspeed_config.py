"""Lets DeepSpeed read a config after ds_ext has found no problem, and translates its errors."""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime import constants, lr_schedules
from deepspeed.runtime.activation_checkpointing import config as activation_config
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.utils import logger
from pydantic import ValidationError
from torch.optim import Optimizer

from ds_ext.config import config_checks
from ds_ext.config.optimizer_names import misspelt_sections
from ds_ext.config.parsing import filled, lookup, normalized
from ds_ext.distributed.groups import with_attribute
from ds_ext.errors import raise_all
from ds_ext.hyperparams import describe, did_you_mean, meant, wrong_call
from ds_ext.optimizer import RuleOptimizer
from ds_ext.settings import PLACES, SETTINGS, SIZES

# Top-level keys that neither ``SETTINGS`` nor constants of DeepSpeed's modules name.
_SECTIONS = {
    *("sparse_gradients", "amp", "data_parallel_size", "compression_training", "elasticity"),
    *("monitor_config", "tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "aio"),
    *("timers", "zenflow", "progressive_layer_drop", "eigenvalue", "quantize_training"),
    "sparse_attention",
}
# Sections whose keys DeepSpeed looks up one by one, so that it ignores others.
_DICTIONARIES = "scheduler data_types activation_checkpointing checkpoint torch_autocast".split()
# The sections that DeepSpeed's models read.
_SECTION_OF = {
    **{"DeepSpeedZeroConfig": "zero_optimization", "CommsLoggerConfig": "comms_logger"},
    **{"DeepSpeedBF16Config": "bf16", "DeepSpeedFP16Config": "fp16", "CompileConfig": "compile"},
}
# Keys that a client fills in before DeepSpeed reads a config.
_NEVER_AUTO = (*SIZES, "zero_optimization.stage")


def read(make: Callable[[], None], config: dict[str, Any]) -> None:
    """Lets DeepSpeed read a config that concerns ds_ext, by ``make``, its constructor.

    Values may be "auto", which a client fills in later. ValueError with a line for each problem.
    """
    given = filled(config)[0]
    reading = config_checks.read(given)
    found = [*left_auto(config, _NEVER_AUTO), *reading.problems]
    found += scheduler_problems(reading.values, reading.ours)
    if found:
        raise_all([*found, *unknown(given)])
    try:
        with translated():
            make()
    except ValueError as error:
        size = reading.values.get("sequence_parallel_size", 1)
        if size == 1:
            raise
        raise ValueError(
            f"{error} sequence_parallel_size = {size} needs an mpu, which accelerate passes for "
            f"ParallelismConfig(sp_size={size}); it also divides the number of data-parallel ranks."
        ) from None
    # Not of DeepSpeed's ``world_size``, which it has divided by sequence_parallel_size.
    ranks = dist.get_world_size() if dist.is_initialized() else None
    raise_all(config_checks.size_problems(reading.values, ranks))


def left_auto(config: dict[str, Any], keys: Iterable[str]) -> Iterator[str]:
    """Yields a message for each key that no client has filled in."""
    for key in (key for key in keys if lookup(config, key) == "auto"):
        allowed = describe(SETTINGS[key].type) if key in SETTINGS else "a value"
        yield (
            f'{key} is "auto", which is filled in by HF Trainer and accelerate only: write '
            f"{allowed}."
        )


def raised(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Yields what is refused when DeepSpeed reads a config without problems of ds_ext.

    That is DeepSpeed's error, or what contradicts the accumulation that batch sizes imply. These
    are not checked if one is "auto", or if the number of data-parallel ``ranks`` is unknown (None).
    """
    own = normalized(config)
    sizes = {key: own.pop(key, None) for key in SIZES}
    given = [key for key in SIZES if config.get(key) is not None]
    is_implied = ranks is not None and all(sizes[key] is not None for key in given)
    made = object.__new__(DeepSpeedConfig)
    make = inspect.unwrap(DeepSpeedConfig.__init__)  # ours would check it again, for one rank
    with with_attribute(logger, "level", logging.ERROR):
        try:
            with translated():
                make(made, own | ({SIZES[1]: 1} if given else {}))
                if is_implied:
                    vars(made).update(sizes, world_size=ranks)
                    made._configure_train_batch_size()
                    own["gradient_accumulation_steps"] = made.gradient_accumulation_steps
        except ValueError as error:
            yield str(error)
            return
    if is_implied:
        yield from config_checks.read(own).problems


def unknown(config: dict[str, Any]) -> Iterator[str]:
    """Yields a message for each key that DeepSpeed does not read and does not refuse."""
    modules = (constants, runtime_config, activation_config)
    values = [value for module in modules for value in vars(module).values()]
    known = {v for v in values if isinstance(v, str) and v.isidentifier()} | _SECTIONS
    known |= {key.partition(".")[0] for key in SETTINGS}
    known -= {"max_grad_norm"}  # of "params" of DeepSpeed's optimizers
    known |= misspelt_sections(config).keys()  # which is refused
    for where in ("", *_DICTIONARIES):
        yield from config_checks.unread_keys(config, where, known)


def scheduler_problems(config: dict[str, Any], optimizer: RuleOptimizer | None) -> Iterator[str]:
    """Yields a message if DeepSpeed could not make the scheduler of a ``normalized`` config.

    ``optimizer`` is the one that the config names, if it is of ds_ext.
    """
    if not config.get("scheduler"):
        return
    name, params = config["scheduler"]["type"], config["scheduler"]["params"]
    made = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if made is None:
        known = [*lr_schedules.VALID_LR_SCHEDULES, *torch.optim.lr_scheduler.__all__]
        guess = did_you_mean(name, known)
        where = "DeepSpeed and torch.optim.lr_scheduler"
        yield f"scheduler.type is {name!r}, which {where} do not have.{guess}"
        return
    if wrong := wrong_call(made, None, **params):
        yield f"scheduler.params: {name} {wrong}"
    elif optimizer is not None:
        try:
            refuse_without_rate(optimizer)
            _try_scheduler(name, made, params, optimizer)
        except ValueError as error:
            yield str(error)


def refuse_without_rate(optimizer: RuleOptimizer) -> None:
    """Raises ValueError for the optimizer of a scheduler if it has no learning rate."""
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            "Adafactor: optimizer.params.relative_step=true computes its own step size, so there "
            'is no lr for a scheduler to set. Set "relative_step": false and an "lr" (HF Trainer '
            "always has a scheduler), or remove the scheduler."
        )


def _try_scheduler(
    name: str, make: Callable[..., Any], params: dict[str, Any], optimizer: RuleOptimizer
) -> None:
    """Makes a scheduler for a stand-in of an optimizer, and steps it once; ValueError if it fails.

    Lists of a value for each group are not tried: only a run has all groups.
    """
    if any(isinstance(value, list) for value in params.values()):
        return
    groups = [
        {**group, "params": [torch.empty((), dtype=torch.float32, device="cpu")]}
        for group in optimizer.param_groups
    ]
    stand_in = Optimizer(groups, optimizer.defaults)
    with scheduler_errors(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped
        scheduler = make(stand_in, **params)
        if "metrics" not in inspect.signature(scheduler.step).parameters:
            scheduler.step()
        if (lr := min(group["lr"] for group in stand_in.param_groups)) < 0:
            raise ValueError(f"it sets a learning rate of {lr}.")
    refuse_betas(optimizer, name, stand_in.param_groups)


@contextmanager
def scheduler_errors(name: str) -> Iterator[None]:
    """Context that makes a scheduler; its errors become a ValueError that names the key."""
    try:
        yield
    except Exception as error:  # of any class: it depends on the scheduler
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(f"scheduler.params: {name} cannot be made with them: {what}") from error


def refuse_betas(optimizer: RuleOptimizer, scheduler: str, groups: list[dict[str, Any]]) -> None:
    """Raises ValueError if a scheduler has set another number of betas than a rule has."""
    for group in groups:
        hypers, found = optimizer.hypers_of(group), len(group.get("betas", ()))
        if (needed := len(getattr(hypers, "betas", ()))) != found:
            raise ValueError(
                f"{hypers.__name__} has {needed} betas, and {scheduler} sets {found}: put "
                '"cycle_momentum": false into scheduler.params.'
            )


def replaced_rates(config: dict[str, Any], lrs: Iterable[Any]) -> Iterator[str]:
    """Yields a warning if a config's scheduler replaces ``lrs``, the rates of its optimizer."""
    name, params = (lookup(config, f"scheduler.{key}") for key in ("type", "params"))
    if name not in ("WarmupLR", "WarmupDecayLR"):
        return
    default = inspect.signature(getattr(lr_schedules, name)).parameters["warmup_max_lr"].default
    peak, found = (params or {}).get("warmup_max_lr", default), dict.fromkeys(lrs)
    is_only_one = len(found) == 1 and lookup(config, "optimizer.params.lr") is None
    if peak in (None, "auto") or isinstance(peak, list) or (is_only_one and peak is not default):
        return
    if others := [str(lr) for lr in found if lr != peak]:
        yield (
            f"scheduler.params.warmup_max_lr = {peak}{' (the default)' * (peak is default)} "
            f"replaces the learning rates of the optimizer, {', '.join(others)}: set it to that "
            "rate. Several rates are multiplied by WarmupCosineLR, and by torch's LinearLR."
        )


@contextmanager
def translated() -> Iterator[None]:
    """Context in which DeepSpeed reads a config: its errors become a ValueError that says so."""
    try:
        yield
    except ValidationError as error:
        known = {key.rpartition(".")[2] for key in SETTINGS}
        fields = [section.model_fields for section in DeepSpeedConfigModel.__subclasses__()]
        known.update(field.alias or name for each in fields for name, field in each.items())
        wrong = []
        for one in error.errors():
            key = ".".join(map(str, (_SECTION_OF.get(error.title, error.title), *one["loc"])))
            is_unknown = one["type"] == "extra_forbidden"
            guess = meant(key, known - {one["loc"][-1]}, PLACES) if is_unknown else ""
            wrong.append(f"{key}: {one['msg']}.{guess}")
        raise ValueError(f"DeepSpeed refuses the config: {' '.join(wrong)}") from None
    except (DeepSpeedConfigError, AssertionError, AttributeError, KeyError, TypeError) as error:
        what = str(error) or type(error).__name__
        raise ValueError(f"DeepSpeed refuses the config: {what}") from error
