"""Checks settings of HF Trainer and accelerate that never reach DeepSpeed.

Without these checks, some settings would be ignored silently: Trainer's optimizer arguments if the
config names an optimizer, or lacks their keys; an optimizer object, which Trainer replaces; the
norm to which accelerate clips; and the number of processes among which accelerate divides the data.
If the config has no scheduler, Trainer passes DeepSpeed a function that creates one. The function
holds its Trainer.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from ds_ext import hyperparams
from ds_ext.engine.rank_logging import warn
from ds_ext.errors import raise_all
from ds_ext.optimizer import RuleOptimizer

_REMEDIES = {  # of arguments
    "optim": 'remove it: the config\'s "optimizer" names the optimizer.',
    "optim_args": "remove it, and set its values in optimizer.params of the config.",
    "optim_target_modules": "remove it, and set target_modules in optimizer.params of the config.",
}
_REMEDY = 'remove it: the config\'s "optimizer" and "scheduler" define both.'  # of objects
# Keys of optimizer.params by the arguments that fill in "auto".
_FILLS = {
    "lr": ["learning_rate"],
    "weight_decay": ["weight_decay"],
    "betas": ["adam_beta1", "adam_beta2"],
    "eps": ["adam_epsilon"],
}
_DEFAULTS = (None, "adamw_torch", "adamw_torch_fused")  # in all versions of transformers
_warn_once = functools.cache(warn)


def refuse_ignored(scheduler: Callable[..., Any] | None) -> None:
    """Raises ValueError if Trainer, whose config names our optimizer, was given settings of one.

    ``scheduler`` is the function that creates the scheduler, if DeepSpeed was given one.
    """
    trainer = _trainer_of(scheduler)
    found: dict[str, str] = {}
    for name, remedy in _REMEDIES.items():
        value = getattr(getattr(trainer, "args", None), name, None)
        value = getattr(value, "value", value)  # it may be an enum
        if value not in _DEFAULTS:
            found[f"TrainingArguments.{name} = {value!r}"] = remedy
    optimizer = _passed(trainer, "optimizer")
    if optimizer or _passed(trainer, "lr_scheduler"):
        found[f"Trainer(optimizers=...): {type(optimizer).__name__}"] = _REMEDY
    if getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        found["Trainer(optimizer_cls_and_kwargs=...)"] = _REMEDY
    why = "would be ignored, because the DeepSpeed config names an optimizer of ds_ext"
    raise_all(f"{what} {why}: {remedy}" for what, remedy in found.items())


def warn_unclipped(clipped_by: float) -> None:
    """Warns if accelerate asks for the norm to clip to another one than the config's.

    Its ``clip_grad_norm_``, which HF Trainer calls too, only reads the norm under DeepSpeed.
    ``clipped_by`` is the config's clipping norm.
    """
    caller = inspect.currentframe() if "accelerate" in sys.modules else None
    while caller is not None and caller.f_code.co_name != "clip_grad_norm_":
        caller = caller.f_back
    asked = None if caller is None else caller.f_locals.get("max_norm")
    if isinstance(asked, int | float) and 0 < asked < math.inf and asked != clipped_by:
        _warn_once(
            f"max_grad_norm = {asked:g}, of TrainingArguments or accelerator.clip_grad_norm_, has "
            f"no effect under DeepSpeed, and the config's gradient_clipping is {clipped_by:g}. Set "
            f'"gradient_clipping": {asked:g} in the config.'
        )


def warn_unread(
    scheduler: Callable[..., Any] | None, rule: type, params: Mapping[str, Any]
) -> None:
    """Warns if Trainer was given hyper-parameters for which the config has no key.

    Args:
        scheduler: see ``refuse_ignored``.
        rule: the dataclass of the optimizer's hyper-parameters.
        params: the section optimizer.params of the config.
    """
    args = getattr(_trainer_of(scheduler), "args", None)
    defaults = {f.name: f.default for f in fields(args)} if is_dataclass(args) else {}
    for key, arguments in _FILLS.items():
        if not defaults.keys() >= {*arguments}:  # arguments of another program
            continue
        given = [getattr(args, name) for name in arguments]
        value = given if len(given) > 1 else given[0]
        is_default = given == [defaults[name] for name in arguments]
        is_allowed = not hyperparams.checked(rule, {key: value}, "")[1]
        if is_allowed and not is_default and key not in params:
            told = ", ".join(f"{n} = {x:g}" for n, x in zip(arguments, given, strict=True))
            warn(
                f"TrainingArguments.{told} has no effect, because the config has no "
                f'optimizer.params.{key}: write "{key}": "auto" there.'
            )


def warn_dropped(model: nn.Module, taken: str) -> None:
    """Warns if an optimizer of ds_ext was made for a model, and the engine uses ``taken``."""
    params = set(model.parameters())
    for given in RuleOptimizer.instances:
        if not given.state and not params.isdisjoint(given.group_of):
            name = type(given).__name__
            warn(
                f"{name} was made for this model, but {taken} steps it. HF Trainer replaces "
                f"Trainer(optimizers=...) under DeepSpeed: name {name} in the DeepSpeed config, "
                f'"optimizer": {{"type": "{name}"}}; or give Trainer '
                f"optimizer_cls_and_kwargs=(ds_ext.{name}, {{...}}) and a config without an "
                "optimizer and without offload_optimizer, for which accelerate makes its own."
            )


def refuse_same_data(data_parallel_size: int) -> None:
    """Raises ValueError if accelerate divides the data among fewer processes than ranks.

    Without a GPU, accelerate assumes a single process unless it is configured for the CPU. All
    ranks would then get the same data.
    """
    state = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = {} if state is None else state.PartialState._shared_state
    counted = shared.get("num_processes")
    if counted is not None and counted < data_parallel_size:
        raise ValueError(
            f"accelerate counts {counted} process{'es' * (counted > 1)}, but DeepSpeed has "
            f"{data_parallel_size} data-parallel ranks, which would train on the same data. On a "
            "machine without GPUs call accelerate.PartialState(cpu=True) before everything else of "
            "accelerate, or set TrainingArguments(use_cpu=True)."
        )


def _passed(trainer: Any, what: str) -> Any:
    """The object that was passed to Trainer, read from its callback handler; None if none.

    After a first ``train()``, the handler has accelerate's wrapper of the engine's object instead.
    """
    found = getattr(getattr(trainer, "callback_handler", None), what, None)
    return None if type(found).__module__.startswith("accelerate.") else found


def _trainer_of(scheduler: Callable[..., Any] | None) -> Any:
    """The Trainer that a function creates a scheduler for; None for functions of others."""
    if not inspect.isfunction(scheduler) or not scheduler.__module__.startswith("transformers."):
        return None
    return inspect.getclosurevars(scheduler).nonlocals.get("trainer")
