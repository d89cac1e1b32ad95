"""Finds the settings of a DeepSpeed config that ds_ext refuses or ignores.

An engine and ``python -m ds_ext check`` call the same functions, so they say the same sentences.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_ext import hyperparams
from ds_ext.backward import int8_weights
from ds_ext.config import optimizer_names, parsing
from ds_ext.config.parsing import lookup
from ds_ext.errors import raise_all
from ds_ext.ops import int8, sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, param_groups, sections
from ds_ext.optimizer.model_view import ModelView
from ds_ext.optimizer.param_table import ParamGroup, hypers_of
from ds_ext.rules import REGISTRY
from ds_ext.rules.base import key_of
from ds_ext.settings import PLACES, SETTINGS, Section

_OFFLOAD = "zero_optimization.offload_optimizer.device"
_STAGE = "zero_optimization.stage"
_OF_OPTIMIZER = ("type", "params")  # keys of the section


@dataclass
class Reading:
    """What a run reads from a config."""

    values: dict[str, Any]  # as DeepSpeed reads them, without the sections of wrong ones
    problems: list[str]  # the messages with which a run refuses it, for any number of ranks
    ours: RuleOptimizer | None = None  # the optimizer that it names, if it is of ds_ext
    groups: Sequence[ParamGroup] = ()  # of that, with the hyper-parameters of each only
    other: str = ""  # the type of an optimizer of another library


def read(config: dict[str, Any], model: ModelView | None = None) -> Reading:
    """Reads a ``parsing.filled`` config; without a model, its optimizer has one matrix a group."""
    values, found = parsing.well_formed(config)
    made = Reading(values, found)
    meant = optimizer_names.misspelt_sections(values)
    found += [f'unknown key {key}. Did you mean "{meant[key]}"?' for key in meant]
    try:
        _make_optimizer(made, model)
    except ValueError as error:
        found += str(error).splitlines()
    if not made.other:
        found += problems(values)
    return made


# The settings.


def problems(config: dict[str, Any], kept_for: str = "") -> Iterator[str]:
    """Yields a message for each setting that ds_ext cannot honour. All ranks yield the same.

    For ``config`` and ``kept_for`` see ``parsing.gradients``.
    """
    stage = lookup(config, _STAGE) or 0
    for key in (key for key in SETTINGS if is_on(config, key)):
        setting, value = SETTINGS[key], lookup(config, key)
        shown = f"{key} = {value!r}"
        if setting.removed:
            yield f"{shown} was removed in ds_ext {setting.removed}: {setting.advice}"
        elif setting.advice and value not in setting.allowed:
            yield f"{shown} is not supported: {setting.advice}"
        if setting.needs_stage_3 and stage != 3:
            yield (
                f"{shown} works only at zero_optimization.stage 3, and the stage is {stage}: "
                "remove it, or set stage 3."
            )
        for other in (other for other in setting.excludes if is_on(config, other)):
            yield (
                f"{shown} is not supported together with {other} = {lookup(config, other)!r}: "
                "remove one of them."
            )
    try:
        parsing.gradients(config, kept_for=kept_for)
    except ValueError as error:
        yield from str(error).splitlines()


def is_on(config: dict[str, Any], key: str) -> bool:
    """Returns whether a config sets a key of ``SETTINGS`` to a value that is not off."""
    value = lookup(config, key)
    return value is not None and not SETTINGS[key].off(value)


def ignored(config: dict[str, Any], optimizer: RuleOptimizer | None) -> Iterator[str]:
    """Yields a message for each setting of a ``normalized`` config that has almost no effect."""
    for key, setting in SETTINGS.items():
        if setting.no_effect and is_on(config, key):
            yield f"{key} = {lookup(config, key)!r} has no effect: {setting.no_effect}."
    if optimizer is not None and lookup(config, _OFFLOAD) == "cpu":
        if not any(_keeps_moments(optimizer.rule_of(p)) for p in optimizer.group_of):
            yield (
                f"{_OFFLOAD} = 'cpu' has almost no effect: {type(optimizer).__name__} keeps at "
                "most 4 bytes for each row and column of a matrix. offload_param moves weights."
            )


def _keeps_moments(rule: Any) -> bool:
    """Whether a rule keeps more than row and column statistics for a matrix of 16-bit weights."""
    parts = leaves(rule.state_spec(Shard.whole((512, 512))))
    weight = torch.empty(0, dtype=torch.bfloat16, device="cpu")
    return bool(sixteen_bit.master(weight, rule)) or any(not part.is_shared for _, part in parts)


# Sizes that must match the number of ranks.


def size_problems(config: dict[str, Any], ranks: int | None) -> Iterator[str]:
    """Yields a message for each group size that does not divide the ranks (None: unknown)."""
    for key in group_keys(config) if ranks is not None else ():
        size = lookup(config, key)
        means_all = SETTINGS[key].may_exceed_ranks and size >= ranks
        if ranks % size and not means_all:
            yield f"{key} = {size} does not divide the {ranks} ranks: set it to a divisor."


def group_keys(config: dict[str, Any]) -> list[str]:
    """Returns the keys of a config that set a group size. It must divide the number of ranks."""
    return [key for key in SETTINGS if SETTINGS[key].divides_ranks and is_on(config, key)]


# The optimizer.


def _make_optimizer(made: Reading, model: ModelView | None) -> None:
    """Makes the optimizer that a config names. ValueError with a line for each wrong key."""
    config = made.values
    section = config.get("optimizer")
    if section is None:
        return
    if section.get("type") is None:
        raise ValueError(
            'optimizer.type is missing or "auto": name an optimizer, such as "AdaLomo".'
        )
    optimizer_names.refuse_unknown(section["type"])
    key, params = optimizer_names.registry_key(section["type"]), section.get("params") or {}
    if key is None:
        made.other = section["type"]
        return
    own = [f"optimizer.params.{name}" for name in hyperparams.names(hypers_of(REGISTRY[key].rule))]
    wrong, grouped = param_groups.stand_ins(REGISTRY[key], params)
    raise_all([*unread_keys(config, "optimizer", _OF_OPTIMIZER, own), *wrong])
    if model is not None:
        trained = [p for p in model if p.requires_grad]
        grouped = param_groups.of_config(REGISTRY[key], params, model, trained)
    made.groups = grouped.groups
    made.ours = OPTIMIZERS[key](grouped.groups, **grouped.hypers)
    made.problems += _unsupported(config, made.ours, model)


def unread_keys(
    config: dict[str, Any], where: str, known: Collection[str], places: Iterable[str] = ()
) -> Iterator[str]:
    """Yields a message for each key of a section that nothing reads.

    Args:
        config: a DeepSpeed config.
        where: its section; "" for the config itself.
        known: the names of keys that DeepSpeed reads there.
        places: dotted keys that are meant by others of their name, in addition to ``PLACES``.
    """
    section = lookup(config, where)
    for name in section if isinstance(section, dict) else ():
        key = hyperparams.dotted(where, name)
        if name not in known and key not in SETTINGS:
            guess = hyperparams.meant(key, known, {*PLACES, *places})
            ignored = ", which DeepSpeed ignores" if where != "optimizer" else ""
            yield f"unknown key {key}{ignored}.{guess}"


def unread(config: dict[str, Any], optimizer: str) -> Iterator[str]:
    """Yields a message for each setting of ds_ext under an ``optimizer`` that is not its own."""
    of_params = {"param_groups", "nbits", *hyperparams.names(sixteen_bit.RoundingConfig)}
    given = (lookup(config, "optimizer.params") or {}).keys()
    keys = [f"optimizer.params.{key}" for key in sorted(of_params & given)]
    own, default = config.get("ds_ext") or {}, vars(Section())
    is_section = isinstance(own, dict)
    meant = REGISTRY.get(key_of(optimizer), REGISTRY["adamw"])
    ours = optimizer_names.in_config(meant.spelling)
    keys += [f"ds_ext.{k}" for k in own if own[k] != default.get(k)] if is_section else ["ds_ext"]
    for key in keys:
        yield (
            f"{key} = {lookup(config, key)!r} is a setting of ds_ext, and {optimizer} is not a "
            f'ds_ext optimizer: remove it, or name one, such as "{ours}", in optimizer.type.'
        )


def _unsupported(
    config: dict[str, Any], optimizer: RuleOptimizer, model: ModelView | None
) -> Iterator[str]:
    """Yields the settings that an optimizer or a model does not support."""
    is_divided = is_on(config, "tensor_parallel.autotp_size")
    if is_divided and any(sections.are_set(optimizer.rule_of(p)) for p in optimizer.group_of):
        yield (
            "split and heads are not supported together with tensor_parallel.autotp_size, which "
            "divides the matrices: remove one of them."
        )
    try:
        own = parsing.section(config)
    except ValueError:
        return  # ``problems`` yields it
    if own.weight_storage:
        found = [int8_weights.refused_hypers(optimizer, p) for p in optimizer.group_of]
        if found and all(found):  # only the run knows which weights it stores
            yield str(found[0])
        if model is not None and not any(int8.fits(p.shape) for p in model if p.requires_grad):
            yield int8_weights.NO_MATRIX
