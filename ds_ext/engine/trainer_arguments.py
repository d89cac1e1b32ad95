"""What HF Trainer was told of its optimizer beside a config that names one: it would be ignored."""

import sys
from types import FrameType
from typing import Any

_ADVICE = {
    "optim": 'remove it: the config\'s "optimizer" says which one it is.',
    "optim_args": "remove it, and put what it says into optimizer.params of the config.",
    "optim_target_modules": "remove it, and put target_modules into optimizer.params of it.",
}
_DEFAULTS = (None, "adamw_torch", "adamw_torch_fused")  # of the versions of transformers


def refuse() -> None:
    """Checks the TrainingArguments of the Trainer, if there is one, that makes this engine.

    DeepSpeed is not handed them, and transformers is not to be touched: they are found among the
    callers.

    Raises:
        ValueError: one of them names another optimizer, or settings of it.
    """
    arguments = _of_caller(sys._getframe(1))
    for name, advice in _ADVICE.items():
        value = getattr(arguments, name, None)
        value = getattr(value, "value", value)  # of an enumeration
        if value not in _DEFAULTS:
            raise ValueError(
                f"TrainingArguments.{name} = {value!r} would be ignored beside the DeepSpeed "
                f"config, which names an optimizer of ds_ext: {advice}"
            )


def _of_caller(frame: FrameType | None) -> Any:
    """The TrainingArguments of the nearest caller that has any; None if none has."""
    while frame is not None:
        arguments = getattr(frame.f_locals.get("self"), "args", None)
        if any(kind.__name__ == "TrainingArguments" for kind in type(arguments).__mro__):
            return arguments
        frame = frame.f_back
    return None
