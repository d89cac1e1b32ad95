"""For HF Trainer: its callback that reports what ds_ext's steps tell. The only import of it."""

import sys
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Puts what a step tells into HF Trainer's logs, and so wherever ``report_to`` sends them.

    ``Trainer(..., callbacks=[ds_ext.MetricsCallback()])``. Beside Trainer's own ``grad_norm`` these
    are ``clip_coefficient``, ``clipped_fraction``, ``loss_scale``, ``skipped_steps`` of the whole
    run, and by parameter group ``update_rms/NAME`` and ``weight_rms/NAME``, all of the last step;
    and of the steps since the last log ``skipped_parameters`` and ``bytes_sent`` by this rank's
    optimizer. To measure updates takes 5 to 30 % of the optimizer's time on a CPU.

    Args:
        measure_updates: whether ``update_rms`` and ``weight_rms`` are measured.

    Raises:
        ValueError: when training begins, if DeepSpeed does not step an optimizer of ds_ext.
    """

    def __init__(self, measure_updates: bool = True) -> None:
        self.measure_updates = measure_updates
        self.sums = dict.fromkeys(_SUMMED, 0.0)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Goes before the callbacks that report, which else would be told the logs first."""
        handler = sys._getframe(1).f_locals["self"]
        assert isinstance(handler, CallbackHandler)
        handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]
        self.sums = dict.fromkeys(_SUMMED, 0.0)
        stepped = _stepped(optimizer)
        if self.measure_updates:
            stepped.measure_updates()

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Adds up what is told of each step."""
        told = _stepped(optimizer).metrics()
        for name in _SUMMED:
            self.sums[name] += told.get(name, 0)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any],
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Adds the metrics to logs of training, not to those of evaluation or of its end."""
        if "loss" not in logs:
            return
        told = _stepped(optimizer).metrics() | self.sums
        self.sums = dict.fromkeys(_SUMMED, 0.0)
        more = {name: value for name, value in told.items() if name not in logs}
        logs.update(more)
        state.log_history[-1].update(more)


_SUMMED = ("skipped_parameters", "bytes_sent")


def _stepped(optimizer: Any) -> Any:
    """What steps a Trainer's model, inside accelerate's wrapper: the engine's optimizer."""
    while optimizer is not None and not hasattr(optimizer, "measure_updates"):
        optimizer = getattr(optimizer, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            "ds_ext.MetricsCallback: this Trainer is stepped by no optimizer of ds_ext. Name one "
            'in the DeepSpeed config: "optimizer": {"type": "AdaLomo"}; or leave it out.'
        )
    return optimizer
