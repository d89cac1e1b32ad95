"""Checks settings of HF Trainer and accelerate that never reach DeepSpeed.

Without these checks, some settings would be ignored silently: Trainer's optimizer arguments if the
config names an optimizer; an optimizer object, which Trainer replaces; the norm that is passed to
accelerate for clipping; and the number of processes among which accelerate divides the data.
ds_ext does not patch these libraries. This module therefore finds Trainer on the call stack.
"""

import functools
import math
import sys
from types import FrameType
from typing import Any

from ds_ext.engine.rank_logging import warn
from ds_ext.optimizer import RuleOptimizer

_ADVICE = {
    "optim": 'remove it: the config\'s "optimizer" names the optimizer.',
    "optim_args": "remove it, and set its values in optimizer.params of the config.",
    "optim_target_modules": "remove it, and set target_modules in optimizer.params of the config.",
}
_DEFAULTS = (None, "adamw_torch", "adamw_torch_fused")  # in all versions of transformers


def refuse_ignored() -> None:
    """Checks Trainer's arguments, if Trainer creates an engine whose config names our optimizer.

    Raises:
        ValueError: Trainer was given an optimizer, or settings of one.
    """
    trainer = _caller(sys._getframe(1))
    for name, advice in _ADVICE.items():
        value = getattr(getattr(trainer, "args", None), name, None)
        value = getattr(value, "value", value)  # it may be an enum
        if value not in _DEFAULTS:
            _refuse_ignored(f"TrainingArguments.{name} = {value!r}", advice)
    advice = 'remove it: the config\'s "optimizer" and "scheduler" define both.'
    if _given(trainer, "optimizer") or _given(trainer, "lr_scheduler"):
        _refuse_ignored("Trainer(optimizers=...)", advice)
    if getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        _refuse_ignored("Trainer(optimizer_cls_and_kwargs=...)", advice)


def refuse_dropped(taken: Any) -> None:
    """Checks that Trainer, if any, passes a ds_ext optimizer on to DeepSpeed.

    Args:
        taken: the optimizer object that the engine gets; None if the config names an optimizer.

    Raises:
        ValueError: Trainer was given a ds_ext optimizer, and the engine gets another.
    """
    given = _given(_caller(sys._getframe(1)), "optimizer")
    if isinstance(given, RuleOptimizer) and taken is not given:
        name = type(given).__name__
        instead = "the config's optimizer" if taken is None else type(taken).__name__
        raise ValueError(
            f"Trainer(optimizers=...) was given {name}, which HF Trainer replaces by {instead} "
            f"under DeepSpeed: remove it, and name {name} in the DeepSpeed config, "
            f'"optimizer": {{"type": "{name}"}}; or give Trainer '
            f"optimizer_cls_and_kwargs=(ds_ext.{name}, {{...}}) and a config without an optimizer."
        )


def num_processes() -> int | None:
    """Returns the number of processes that accelerate divides data among; None without it."""
    state = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = {} if state is None else state.PartialState._shared_state
    return shared.get("num_processes")


def refuse_same_data(data_parallel_size: int) -> None:
    """Checks that accelerate divides the data among all data-parallel ranks.

    Without a GPU, accelerate assumes a single process unless it is configured for the CPU. All
    ranks would then get the same data.

    Args:
        data_parallel_size: the number of data-parallel ranks.

    Raises:
        ValueError: accelerate divides the data among fewer processes.
    """
    counted = num_processes()
    if counted is not None and counted < data_parallel_size:
        raise ValueError(
            f"accelerate counts {counted} process{'es' * (counted > 1)}, but DeepSpeed has "
            f"{data_parallel_size} data-parallel ranks, which would train on the same data. On a "
            "machine without GPUs call accelerate.PartialState(cpu=True) before everything else of "
            "accelerate, or set TrainingArguments(use_cpu=True)."
        )


def warn_unclipped(clipped_by: float) -> None:
    """Warns if accelerate's ``max_norm`` differs from the config's ``gradient_clipping``.

    With DeepSpeed, accelerate's ``clip_grad_norm_`` only reads the gradient norm from the engine.

    Args:
        clipped_by: the config's gradient_clipping; 0 for none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "clip_grad_norm_":
        frame = frame.f_back
    asked = None if frame is None else frame.f_locals.get("max_norm")
    if isinstance(asked, int | float) and 0 < asked < math.inf and asked != clipped_by:
        _warn_unclipped(asked, clipped_by)


@functools.cache
def _warn_unclipped(asked: float, clipped_by: float) -> None:
    """Warns once per pair of values."""
    warn(
        f"accelerator.clip_grad_norm_(max_norm={asked:g}), which Trainer calls with its "
        "max_grad_norm, has no effect under DeepSpeed, and the config's gradient_clipping is "
        f'{clipped_by:g}. Set "gradient_clipping": {asked:g} in the config.'
    )


def _refuse_ignored(what: str, advice: str) -> None:
    raise ValueError(
        f"{what} would be ignored, because the DeepSpeed config names an optimizer of ds_ext: "
        f"{advice}"
    )


def _given(trainer: Any, what: str) -> Any:
    """The object that was passed to Trainer, read from its callback handler; None if none.

    After a first ``train()``, the handler has accelerate's wrapper of the engine's object instead.
    """
    found = getattr(getattr(trainer, "callback_handler", None), what, None)
    return None if type(found).__module__.startswith("accelerate.") else found


def _caller(frame: FrameType | None) -> Any:
    """The nearest Trainer on the call stack, recognized by its TrainingArguments; or None.

    Reads only frames of transformers: up to Python 3.12, reading ``f_locals`` of a frame keeps its
    variables, such as engines, alive as long as the frame runs.
    """
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "transformers":
            found = frame.f_locals.get("self")
            kinds = type(getattr(found, "args", None)).__mro__
            if any(kind.__name__ == "TrainingArguments" for kind in kinds):
                return found
        frame = frame.f_back
    return None
