"""Checks that learning-rate schedulers are compatible with the optimizer."""

import inspect
from typing import Any

from ds_ext.optimizer import RuleOptimizer


def refuse_own_rate(optimizer: RuleOptimizer) -> None:
    """Checks that the optimizer has a learning rate that a scheduler can set.

    Raises:
        ValueError: the optimizer computes its own step size.
    """
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            "Adafactor: optimizer.params.relative_step=true computes its own step size, so there "
            'is no lr for a scheduler to set. Set "relative_step": false and an "lr" (HF Trainer '
            "always has a scheduler), or remove the scheduler."
        )


def check_betas(scheduler: Any, optimizer: RuleOptimizer) -> None:
    """Checks that a scheduler sets the number of betas that the optimizer has.

    Raises:
        ValueError: the numbers differ, as for DeepSpeed's OneCycle with CAME.
    """
    for group in optimizer.param_groups:
        hypers = optimizer.hypers_of(group)
        needed = len(getattr(hypers, "betas", ()))
        if len(group.get("betas", ())) != needed:
            raise ValueError(
                f"{hypers.__name__} has {needed} betas; {type(scheduler).__name__} sets "
                f'{group["betas"]}: put "cycle_momentum": false into scheduler.params.'
            )


def check_metrics(scheduler: Any, kwargs: dict[str, Any]) -> None:
    """Checks that a scheduler gets its metric. DeepSpeed would pass the batch size instead.

    Args:
        scheduler: the scheduler, before its step.
        kwargs: the keyword arguments for its step.

    Raises:
        ValueError: the scheduler needs a metric, but ``kwargs`` has none.
    """
    if "metrics" in inspect.signature(scheduler.step).parameters and "metrics" not in kwargs:
        raise ValueError(
            f"{type(scheduler).__name__} needs a metric, but DeepSpeed would give it the batch "
            'size: call engine.step(lr_kwargs={"metrics": ...}), or step it yourself and keep it '
            "from DeepSpeed. In HF Trainer, choose another lr_scheduler_type."
        )
