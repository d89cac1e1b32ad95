"""What callers ask for and DeepSpeed is not told, so that it would be ignored without a word.

HF Trainer's arguments beside a config that names an optimizer, and an optimizer object: Trainer
drops it, and makes torch's AdamW where the config names none. The norm that accelerate is to clip
by, and the number of processes among which it divides the data. DeepSpeed is handed none of them,
and neither library is to be touched: they are found among the callers.
"""

import functools
import math
import sys
from types import FrameType
from typing import Any

from ds_ext.engine.log import warn
from ds_ext.optimizer import RuleOptimizer

_ADVICE = {
    "optim": 'remove it: the config\'s "optimizer" says which one it is.',
    "optim_args": "remove it, and put what it says into optimizer.params of the config.",
    "optim_target_modules": "remove it, and put target_modules into optimizer.params of it.",
}
_DEFAULTS = (None, "adamw_torch", "adamw_torch_fused")  # of the versions of transformers


def refuse_ignored() -> None:
    """Checks the Trainer, if there is one, that makes an engine whose config names ours.

    Raises:
        ValueError: it was given another optimizer, or settings of it.
    """
    trainer = _caller(sys._getframe(1))
    for name, advice in _ADVICE.items():
        value = getattr(getattr(trainer, "args", None), name, None)
        value = getattr(value, "value", value)  # of an enumeration
        if value not in _DEFAULTS:
            _ignored(f"TrainingArguments.{name} = {value!r}", advice)
    advice = 'remove it: the config\'s "optimizer" and "scheduler" say what Trainer makes.'
    if _given(trainer, "optimizer") or _given(trainer, "lr_scheduler"):
        _ignored("Trainer(optimizers=...)", advice)
    if getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        _ignored("Trainer(optimizer_cls_and_kwargs=...)", advice)


def refuse_dropped(taken: Any) -> None:
    """Checks that the Trainer, if there is one, hands on an optimizer of ours that it was given.

    Args:
        taken: the optimizer object that the engine is to have; None if its config names one.

    Raises:
        ValueError: it was given one of ours, and the engine is to have another.
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
    """Returns among how many processes accelerate divides the data; None if nobody asked it to."""
    state = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = {} if state is None else state.PartialState._shared_state
    return shared.get("num_processes")


def refuse_same_data(data_parallel_size: int) -> None:
    """Checks that accelerate divides the data among all ranks of data parallelism.

    Without a GPU accelerate takes each rank for the only process, unless it is asked for the CPU,
    and gives all ranks the same data.

    Args:
        data_parallel_size: the number of these ranks.

    Raises:
        ValueError: if it divides the data among fewer processes.
    """
    counted = num_processes()
    if counted is not None and counted < data_parallel_size:
        raise ValueError(
            f"accelerate counts {counted} process{'es' * (counted > 1)}, but DeepSpeed has "
            f"{data_parallel_size} data-parallel ranks, which would train on the same data. On a "
            "machine without GPUs accelerate has to be asked for the CPU: call "
            "accelerate.PartialState(cpu=True) before everything else of accelerate, or set "
            "ACCELERATE_USE_CPU=1, or TrainingArguments(use_cpu=True)."
        )


def tell_unclipped(clipped_by: float) -> None:
    """Warns where accelerate is asked to clip by another norm than the config says.

    Its ``clip_grad_norm_`` only asks the engine for the norm of the gradients.

    Args:
        clipped_by: the config's gradient_clipping, 0 for none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "clip_grad_norm_":
        frame = frame.f_back
    asked = None if frame is None else frame.f_locals.get("max_norm")
    if isinstance(asked, int | float) and 0 < asked < math.inf and asked != clipped_by:
        _unclipped(asked, clipped_by)


@functools.cache
def _unclipped(asked: float, clipped_by: float) -> None:
    """Says it once."""
    warn(
        f"accelerator.clip_grad_norm_(..., max_norm={asked:g}), which Trainer calls with its "
        "max_grad_norm, clips nothing by itself under DeepSpeed, and gradient_clipping of the "
        f'config is {clipped_by:g}: write "gradient_clipping": {asked:g} there, which is exact.'
    )


def _ignored(what: str, advice: str) -> None:
    raise ValueError(
        f"{what} would be ignored beside the DeepSpeed config, which names an optimizer of "
        f"ds_ext: {advice}"
    )


def _given(trainer: Any, what: str) -> Any:
    """The object that Trainer was made with, which its callbacks still have; None if none.

    After a first ``train()`` they have what accelerate has made of the engine's.
    """
    found = getattr(getattr(trainer, "callback_handler", None), what, None)
    return None if type(found).__module__.startswith("accelerate.") else found


def _caller(frame: FrameType | None) -> Any:
    """The nearest caller that has TrainingArguments, a Trainer; None if there is none.

    Only methods in transformers are looked into: up to Python 3.12 a frame that was asked for its
    variables keeps them, engines among them, for as long as it runs.
    """
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "transformers":
            found = frame.f_locals.get("self")
            kinds = type(getattr(found, "args", None)).__mro__
            if any(kind.__name__ == "TrainingArguments" for kind in kinds):
                return found
        frame = frame.f_back
    return None
