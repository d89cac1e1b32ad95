"""The optimizer that a DeepSpeed config names, over the engine's parameters."""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ext.engine.autotp import EMBEDDINGS, LINEARS, unpartitioned_shape
from ds_ext.engine.log import log
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, param_groups


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
    given = dict(engine.optimizer_params() or {})
    is_galore = name == "galoreadamw"
    targets = given.pop("target_modules", "all-linear") if is_galore else None
    grouped = bool(params) and isinstance(params[0], dict)
    checked = optimizer_type.check(given)
    if checked["weight_decay"] and not grouped:
        groups = param_groups.decay_groups(
            engine.module, params, checked["weight_decay"], unpartitioned_shape
        )
        params = [group for group in groups if group["params"]]
        log(_decay_report(engine, params))
    if is_galore:
        params = param_groups.galore_groups(
            engine.module, params, targets, LINEARS, EMBEDDINGS, unpartitioned_shape
        )
        projected = [p for g in params if "rank" not in g for p in g["params"]]
        names = param_groups.summary(engine.param_names[p] for p in projected)
        log(f"GaLore projects the gradients of: {names}")
    return optimizer_type(params, **checked)


def _ungrouped(engine: DeepSpeedEngine, params: list[Any]) -> list[Any]:
    """Parameters as the user gave them: DeepSpeed puts a flat list with experts into groups."""
    if not engine.has_moe_layers or params[0].get("name") != "dense-params":
        return params
    given = {p for group in params for p in group["params"]}
    return [p for p in engine.param_names if p in given]


def _decay_report(engine: DeepSpeedEngine, groups: list[dict[str, Any]]) -> str:
    def names(decayed: bool) -> str:
        chosen = [g["params"] for g in groups if bool(g["weight_decay"]) == decayed]
        params = [p for group in chosen for p in group if p.requires_grad]
        return param_groups.summary(engine.param_names[p] for p in params)

    decay = groups[0]["weight_decay"]
    return f"weight decay {decay} on: {names(True)}; no weight decay on: {names(False)}"
