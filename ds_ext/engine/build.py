"""The optimizer that a DeepSpeed config names, over the engine's parameters."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_ext.engine import pipeline
from ds_ext.engine.autotp import EMBEDDINGS, LINEARS, unpartitioned_shape
from ds_ext.engine.log import log
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, param_groups
from ds_ext.optimizer.model_view import ModelView, summary
from ds_ext.optimizer.param_groups import Grouped, ParamGroup
from ds_ext.rules import REGISTRY

Names: TypeAlias = Mapping[Tensor, str]


def optimizer_of(engine: DeepSpeedEngine, params: list[Any], name: str) -> RuleOptimizer:
    """Returns the optimizer that the JSON config names, over groups that spare norms and biases.

    Args:
        engine: whose config it is.
        params: the parameters to train, or groups of them, as given to deepspeed.initialize.
        name: the optimizer's key in ``OPTIMIZERS``.

    Raises:
        ValueError: for an unknown or ill-valued hyper-parameter, naming its JSON key.
    """
    params = _ungrouped(engine, params)
    optimizer_type = OPTIMIZERS[name]
    model = ModelView(engine.module, LINEARS, EMBEDDINGS, unpartitioned_shape)
    names: Names = engine.param_names
    if pipeline.is_pipeline(engine):
        model = pipeline.whole_model(model)
        params = pipeline.whole_params(model, params)
        names = model.names
    told = engine.optimizer_params() or {}
    made = param_groups.of_config(REGISTRY[name], told, model, params)
    for line in _report(names, optimizer_type.__name__, made):
        log(line)
    groups = pipeline.of_stage(made.groups) if pipeline.is_pipeline(engine) else made.groups
    return pipeline.on_all_stages(engine, lambda: optimizer_type(groups, **made.hypers))


def for_model(
    kind: type[RuleOptimizer], module: nn.Module, params: Mapping[str, Any]
) -> RuleOptimizer:
    """Returns what ``RuleOptimizer.for_model`` does, also of a model that ZeRO-3 has partitioned.

    Args:
        kind: the optimizer.
        module: the model.
        params: "params" of a config's section "optimizer".

    Raises:
        ValueError: a key is unknown or its value wrong.
    """
    model = ModelView(module, LINEARS, EMBEDDINGS, unpartitioned_shape)
    trained = [p for p in module.parameters() if p.requires_grad]
    made = param_groups.of_config(REGISTRY[kind.rule.__name__.lower()], params, model, trained)
    return kind(made.groups, **made.hypers)


def _ungrouped(engine: DeepSpeedEngine, params: list[Any]) -> list[Any]:
    """Parameters as the user gave them: DeepSpeed puts a flat list with experts into groups."""
    if not engine.has_moe_layers or params[0].get("name") != "dense-params":
        return params
    given = {p for group in params for p in group["params"]}
    return [p for p in engine.param_names if p in given]


def _report(names: Names, optimizer: str, made: Grouped) -> Iterator[str]:
    """What the log says of the groups that a config makes: how which parameters are stepped."""
    decay = made.hypers["weight_decay"]
    if decay and any(group.get("weight_decay") == 0 for group in made.groups):
        decayed = _summary(names, (g for g in made.groups if g.get("weight_decay", decay)))
        others = _summary(names, (g for g in made.groups if not g.get("weight_decay", decay)))
        yield f"weight decay {decay} on: {decayed}; no weight decay on: {others}"
    kinds = [_kind(group, optimizer) for group in made.groups]
    if len({*kinds}) > 1:
        for kind in dict.fromkeys(kinds):
            alike = (g for g, own in zip(made.groups, kinds, strict=True) if own == kind)
            yield f"{kind} on: {_summary(names, alike)}"


def _kind(group: ParamGroup, optimizer: str) -> str:
    """The type of a group, and in what it differs from the optimizer's params: "AdamW, lr=1e-4"."""
    own = {k: v for k, v in group.items() if k not in ("params", "name", "type", "weight_decay")}
    return ", ".join([group.get("type", optimizer), *(f"{k}={v}" for k, v in own.items())])


def _summary(names: Names, groups: Iterable[ParamGroup]) -> str:
    params = (p for group in groups for p in group["params"] if p.requires_grad)
    return summary(names[p] for p in params)
