"""Checks that learning-rate schedulers are compatible with the optimizer."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch.nn import Parameter
from torch.optim import AdamW, lr_scheduler

from ds_ext.config.optimizer_names import did_you_mean
from ds_ext.engine import rank_logging
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


def problems(config: dict[str, Any], optimizer: RuleOptimizer | None) -> Iterator[str]:
    """Yields a message for each problem with the scheduler in a config.

    Args:
        config: a DeepSpeed config without ``parsing.malformed`` values and without "auto".
        optimizer: the optimizer to schedule, whose learning rates change; None if it is another's.
    """
    if "scheduler" not in config:
        return
    name, params = config["scheduler"]["type"], config["scheduler"]["params"]
    own = {n: getattr(lr_schedules, n) for n in lr_schedules.VALID_LR_SCHEDULES}
    torchs = {n: k for n, k in vars(lr_scheduler).items() if isinstance(k, type) and n[0] != "_"}
    kind = {**torchs, **own}.get(name)
    if kind is None:
        yield (
            f"scheduler.type is {name!r}, which DeepSpeed and torch do not have."
            f"{did_you_mean(name, [*own, *torchs])} DeepSpeed's schedulers: {', '.join(own)}."
        )
        return
    with rank_logging.quiet():
        try:
            if optimizer is None:
                weight = torch.empty(1, dtype=torch.float32, device="meta")
                kind(AdamW([Parameter(weight)]), **params)
            else:
                refuse_own_rate(optimizer)
                check_betas(kind(optimizer, **params), optimizer)
        except ValueError as error:
            yield str(error)
        except Exception as error:  # wrong names and types of arguments
            yield f"scheduler.params: {name} refuses them: {error}"
