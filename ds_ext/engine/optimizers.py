"""Resolves the optimizer that a config's "type" names, and creates its param groups."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from ds_ext.config.optimizer_names import TAKEN_OVER, deepspeeds, registry_key
from ds_ext.distributed import consensus
from ds_ext.engine import pipeline
from ds_ext.engine.parameters import EMBEDDINGS, LINEARS, unpartitioned_shape
from ds_ext.engine.rank_logging import log, warn
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, param_groups
from ds_ext.optimizer.model_view import ModelView, model_view, summary
from ds_ext.optimizer.param_groups import Grouped
from ds_ext.rules.base import REGISTRY, key_of


def warn_ignored_type(client: Any, config: DeepSpeedConfig) -> None:
    """Warns if a program passes an optimizer, and its config names one too, which is not used."""
    ignored = config.optimizer_name
    if ignored and (registry_key(ignored) or isinstance(client, RuleOptimizer)):
        name = type(client).__name__ if isinstance(client, torch.optim.Optimizer) else "a function"
        warn(
            f'optimizer.type "{ignored}" in the config has no effect, because the program passes '
            f"{name} to deepspeed.initialize as the optimizer: leave one of them out."
        )


def log_owner(name: str) -> None:
    """Logs that our optimizer is used, if another library has its name too."""
    key = key_of(name)
    kind = OPTIMIZERS[key].__name__
    if key in deepspeeds() | TAKEN_OVER.keys():
        theirs = TAKEN_OVER.get(key, f'DeepSpeed\'s, whose type is "{kind}"')
        log(f"{kind} is ds_ext's, not {theirs}")


def optimizer_of(engine: DeepSpeedEngine, params: list[Any]) -> RuleOptimizer:
    """Returns the optimizer that the config names, of the parameters or groups ``params``.

    Those may be pairs of a name and a parameter. Norms and biases get no weight decay.

    Raises:
        ValueError: a key of the config is wrong, or a parameter is not the model's.
    """
    name = key_of(engine.optimizer_name())
    optimizer_type = OPTIMIZERS[name]
    model: ModelView = model_view(engine.module, LINEARS, EMBEDDINGS, unpartitioned_shape)
    params = _of_model(params, model)
    if pipeline.is_pipeline(engine):
        model = pipeline.whole_model(model)
        params = pipeline.gather_params(model, params)
    names = {p: info.name for p, info in model.items()}
    made = param_groups.of_config(REGISTRY[name], engine.optimizer_params() or {}, model, params)
    for line in _log_lines(names, optimizer_type.__name__, made):
        log(line)
    # A stage of a pipeline steps only its own parameters. A group of it may be empty.
    groups = [{**g, "params": [p for p in g["params"] if not p.is_meta]} for g in made.groups]
    return consensus.run_on_all_ranks(lambda: optimizer_type(groups, **made.hypers), ValueError)


def _of_model(params: Iterable[Any], model: ModelView) -> list[Any]:
    """The parameters or groups that a program has passed, without names of parameters."""
    found = []
    for given in params:
        x = given[1] if isinstance(given, tuple) else given
        own = x.get("params") if isinstance(x, dict) else None
        if own is not None:
            x = {**x, "params": _of_model([own] if isinstance(own, Tensor) else own, model)}
        elif not isinstance(x, Tensor) or x not in model:
            what = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else repr(x)[:99]
            raise ValueError(
                f"model_parameters of deepspeed.initialize has {what}, which is no parameter of "
                "the model: pass model.parameters() of the model that you pass."
            )
        found.append(x)
    return found


def _log_lines(names: Mapping[Tensor, str], optimizer: str, made: Grouped) -> Iterator[str]:
    """Yields log lines about the param groups of a config."""
    decay = made.hypers.get("weight_decay", 0.0)
    if decay and any(group.get("weight_decay") == 0 for group in made.groups):
        by_decay: dict[bool, list[str]] = {True: [], False: []}
        for group in made.groups:
            found = by_decay[bool(group.get("weight_decay", decay))]
            found += [names[p] for p in group["params"] if p.requires_grad]
        decayed, others = summary(by_decay[True]), summary(by_decay[False])
        yield f"weight decay {decay} on: {decayed}; no weight decay on: {others}"
    kinds = param_groups.described(made.groups, optimizer, names)
    if len(kinds) > 1:
        yield from kinds
