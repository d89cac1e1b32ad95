"""Plugin for ms-swift: pass this file as ``--external_plugins``, and a rule as ``--optimizer``."""

import ast
from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map
from torch import nn

from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.rates import RATES


def hypers(learning_rate: float, weight_decay: float, optim_args: str | None) -> dict[str, Any]:
    """Returns an optimizer's "params" from TrainingArguments.

    Args:
        learning_rate: ``--learning_rate``.
        weight_decay: ``--weight_decay``.
        optim_args: ``--optim_args``, such as "rank=64,scale=0.25". Values are Python literals or
            strings.

    Raises:
        ValueError: an entry of ``optim_args`` is not "key=value".
    """
    given: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
    for entry in filter(None, (optim_args or "").split(",")):
        key, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"--optim_args: {entry!r} is not key=value.")
        try:
            given[key.strip()] = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):  # a string without quotes
            given[key.strip()] = value.strip()
    return given


class Callback(OptimizerCallback):  # type: ignore[misc]  # ms-swift is no requirement
    """Creates the optimizer that ``--optimizer`` names, with param groups as from a config."""

    def create_optimizer(self, model: nn.Module | None = None) -> RuleOptimizer:
        """Returns the optimizer. ms-swift then passes model and optimizer to accelerate.

        Raises:
            ValueError: a hyper-parameter is unknown or invalid.
        """
        args = self.args
        own = RATES[args.optimizer].params if args.optimizer in RATES else {}  # as measured
        params = {**own, **hypers(args.learning_rate, args.weight_decay, args.optim_args)}
        kind, model = OPTIMIZERS[args.optimizer], model or self.trainer.model
        if not args.deepspeed:
            return kind.for_model(model, **params)
        from ds_ext.engine import optimizers  # imports DeepSpeed

        return optimizers.for_model(kind, model, params)


optimizers_map.update(dict.fromkeys(OPTIMIZERS, Callback))
