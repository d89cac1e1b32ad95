"""Resolves the optimizer that a config's "type" names, and creates its param groups."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_ext.config import parsing
from ds_ext.engine import pipeline
from ds_ext.engine.parameters import EMBEDDINGS, LINEARS, unpartitioned_shape
from ds_ext.engine.rank_logging import log
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, named, param_groups
from ds_ext.optimizer.groups import ParamGroup
from ds_ext.optimizer.model_view import ModelView, summary
from ds_ext.optimizer.param_groups import Grouped
from ds_ext.rules.base import REGISTRY, key_of

Names: TypeAlias = Mapping[Tensor, str]

PREFIX = "ds_ext."  # optional before the name of any ds_ext optimizer in a config
# DeepSpeed's optimizer names, and names of other libraries that mean ours without the prefix.
_DEEPSPEEDS = frozenset(DEEPSPEED_OPTIMIZERS)
_TAKEN_OVER = {
    "adafactor": "torch.optim's, whose state DeepSpeed leaves full-sized and unfactored",
    "lamb": "DeepSpeed's FusedLamb",
}


def ours(name: str | None) -> str | None:
    """Returns the key in ``OPTIMIZERS`` for a config's type, or None if ds_ext does not own it.

    Args:
        name: ``optimizer.type``. DeepSpeed converts names that it knows to lower case.
    """
    own = key_of(name or "")
    is_theirs = own == name and own in _DEEPSPEEDS - _TAKEN_OVER.keys()
    return own if own in OPTIMIZERS and not is_theirs else None


def registry_key_of_config(optimizer_type: str) -> str | None:
    """Returns the result of ``ours`` for the type in a config that DeepSpeed has not read yet.

    Raises:
        ValueError: no library has an optimizer with that name.
    """
    refuse_unknown(optimizer_type)
    return ours(optimizer_type.lower())


def full_name(name: str) -> str:
    """Returns the unambiguous name of an optimizer of ds_ext, such as "ds_ext.lamb"."""
    return PREFIX + key_of(name)


def is_ours(client: Any, config: DeepSpeedConfig) -> bool:
    """Returns whether an engine will use a ds_ext optimizer.

    Args:
        client: the optimizer that the program passes; None if the config names it. A function that
            makes one says nothing, so the section "ds_ext" decides.
        config: the engine's config.
    """
    if client is None:
        return ours(config.optimizer_name) is not None
    if isinstance(client, torch.optim.Optimizer):
        return isinstance(client, RuleOptimizer)
    return "ds_ext" in config._param_dict


def concerns_us(config: Any) -> bool:
    """Returns whether a config names a ds_ext optimizer or has the section "ds_ext".

    Args:
        config: as given to DeepSpeed: a dictionary, or the path of a file.
    """
    if isinstance(config, str) and os.path.isfile(config):  # not a long text in base 64
        try:
            config = parsing.load(Path(config))
        except ValueError:  # DeepSpeed reports it, or reads Hjson
            return False
    if not isinstance(config, dict):
        return False
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else section
    is_named = isinstance(name, str) and ours(name.lower() if name.lower() in _DEEPSPEEDS else name)
    return bool(is_named) or "ds_ext" in config


def refuse_misspelled(name: str) -> None:
    """Raises ValueError if a config's type is unknown, but similar to the name of our optimizer."""
    near = difflib.get_close_matches(key_of(name), [*OPTIMIZERS, *_DEEPSPEEDS], n=1)
    if name.lower().startswith(PREFIX) or (near and near[0] in OPTIMIZERS):
        refuse_unknown(name)


def refuse_unknown(name: str) -> None:
    """Checks that ds_ext, DeepSpeed or torch has an optimizer with this name.

    Args:
        name: ``optimizer.type``.

    Raises:
        ValueError: the name is unknown.
    """
    if name.lower() in _DEEPSPEEDS or ours(name) or hasattr(torch.optim, name):
        return
    if name.lower().startswith(PREFIX):
        named(name)
    spelled = [entry.spelling for entry in REGISTRY.values()]
    by_lower = {known.lower(): known for known in [*_DEEPSPEEDS, *spelled]}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    guess = f' Did you mean "{by_lower[near[0]]}"?' if near else ""
    raise ValueError(
        f"optimizer.type is {name!r}, which ds_ext, DeepSpeed and torch.optim do not have.{guess} "
        f"Optimizers of ds_ext: {', '.join(spelled)}."
    )


def log_owner(name: str) -> None:
    """Logs that our optimizer is used, if another library has its name too.

    Args:
        name: the full name of the optimizer.
    """
    own = key_of(name)
    kind = OPTIMIZERS[own].__name__
    if own in _DEEPSPEEDS | _TAKEN_OVER.keys():
        theirs = _TAKEN_OVER.get(own, f'DeepSpeed\'s, whose type is "{kind}"')
        log(f"{kind} is ds_ext's, not {theirs}")


# Param groups.


def optimizer_of(engine: DeepSpeedEngine, params: list[Any]) -> RuleOptimizer:
    """Returns the optimizer that the config names. Norms and biases get no weight decay.

    Args:
        engine: the engine.
        params: the parameters to train, or groups of them, as given to deepspeed.initialize.

    Raises:
        ValueError: a hyper-parameter is unknown or invalid. The message names its JSON key.
    """
    name = key_of(engine.optimizer_name())
    optimizer_type = OPTIMIZERS[name]
    model = ModelView(engine.module, LINEARS, EMBEDDINGS, unpartitioned_shape)
    names: Names = engine.param_names
    if pipeline.is_pipeline(engine):
        model = pipeline.whole_model(model)
        params = pipeline.gather_params(model, params)
        names = model.names
    given = engine.optimizer_params() or {}
    made = param_groups.of_config(REGISTRY[name], given, model, params)
    for line in _log_lines(names, optimizer_type.__name__, made):
        log(line)
    groups = pipeline.of_stage(made.groups) if pipeline.is_pipeline(engine) else made.groups
    return pipeline.on_all_stages(engine, lambda: optimizer_type(groups, **made.hypers))


def for_model(
    kind: type[RuleOptimizer], module: nn.Module, params: Mapping[str, Any]
) -> RuleOptimizer:
    """Returns an optimizer as ``RuleOptimizer.for_model`` does. ZeRO-3 may partition the model.

    Args:
        kind: the optimizer's class.
        module: the model.
        params: the "optimizer.params" of a config.

    Raises:
        ValueError: a key is unknown or its value is invalid.
    """
    model = ModelView(module, LINEARS, EMBEDDINGS, unpartitioned_shape)
    trained = [p for p in module.parameters() if p.requires_grad]
    made = param_groups.of_config(REGISTRY[kind.rule.__name__.lower()], params, model, trained)
    return kind(made.groups, **made.hypers)


def _log_lines(names: Names, optimizer: str, made: Grouped) -> Iterator[str]:
    """Yields log lines about the param groups of a config."""
    decay = made.hypers.get("weight_decay", 0.0)
    if decay and any(group.get("weight_decay") == 0 for group in made.groups):
        decayed = _summary(names, (g for g in made.groups if g.get("weight_decay", decay)))
        others = _summary(names, (g for g in made.groups if not g.get("weight_decay", decay)))
        yield f"weight decay {decay} on: {decayed}; no weight decay on: {others}"
    kinds = [param_groups.described(group, optimizer) for group in made.groups]
    if len({*kinds}) > 1:
        for kind in dict.fromkeys(kinds):
            alike = (g for g, own in zip(made.groups, kinds, strict=True) if own == kind)
            yield f"{kind} on: {_summary(names, alike)}"


def _summary(names: Names, groups: Iterable[ParamGroup]) -> str:
    params = (p for group in groups for p in group["params"] if p.requires_grad)
    return summary(names[p] for p in params)
