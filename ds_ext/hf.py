"""Callbacks for HF Trainer: step metrics, and steps inside backward without DeepSpeed.

Importing this module imports transformers. Other modules import it in the functions that need it.
"""

import sys
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ds_ext.backward import owners
from ds_ext.backward.fuse import fuse_into_backward
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.distributed import fully_shard
from ds_ext.optimizer import RuleOptimizer
from ds_ext.settings import PolicyName


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Adds step metrics to HF Trainer's logs, and so to the services in ``report_to``.

    ``Trainer(..., callbacks=[ds_ext.MetricsCallback()])`` logs these metrics:

    - of the last step: ``clip_coefficient``, ``loss_scale``, and for each param group
      ``update_rms/NAME`` and ``weight_rms/NAME``;
    - of the whole run: ``skipped_steps``;
    - since the last log: ``skipped_parameters``, and this rank's ``bytes_sent``.

    Without DeepSpeed, ``FuseCallback`` must be there too; there is no ``loss_scale`` then.
    Measuring updates takes 1 to 4 times the optimizer's time on a CPU.

    Args:
        measure_updates: whether to measure ``update_rms`` and ``weight_rms``.

    Raises:
        ValueError: when training begins, if no optimizer of ds_ext steps inside backward.
    """

    def __init__(self, measure_updates: bool = True) -> None:
        self.measure_updates = measure_updates
        self.sums = dict.fromkeys(_SUMMED, 0.0)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Moves this callback before the reporting callbacks, so that they receive its metrics."""
        callbacks = _handler().callbacks
        callbacks.sort(key=lambda other: other is not self)
        self.sums = dict.fromkeys(_SUMMED, 0.0)
        own = _unwrapped(optimizer)
        will_fuse = any(isinstance(other, FuseCallback) for other in callbacks)
        is_ours = isinstance(own, RuleOptimizer) and (will_fuse or _fused(own) is not None)
        if not (is_ours or hasattr(own, "metrics")):
            raise ValueError(_NOT_STEPPED)
        if self.measure_updates:
            own.measure_updates()

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Adds up the metrics of a step."""
        told = _metrics(optimizer)
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
        """Adds the metrics to training logs, but not to evaluation or final logs."""
        if "loss" not in logs:
            return
        told = _metrics(optimizer) | self.sums
        self.sums = dict.fromkeys(_SUMMED, 0.0)
        more = {name: value for name, value in told.items() if name not in logs}
        logs.update(more)
        state.log_history[-1].update(more)


_SUMMED = ("skipped_parameters", "bytes_sent")


def _handler() -> Any:
    """The object that calls Trainer's callbacks, which a callback may pass on by ``super()``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), CallbackHandler):
            return found
        frame = frame.f_back
    raise RuntimeError(
        "ds_ext.MetricsCallback: on_train_begin was not called by HF Trainer: pass the callback to "
        "Trainer(..., callbacks=[...])."
    )


_NOT_STEPPED = (
    "ds_ext.MetricsCallback: no optimizer of ds_ext steps this Trainer's model inside backward. "
    'Name one in the DeepSpeed config: "optimizer": {"type": "AdaLomo"}; without DeepSpeed add '
    "ds_ext.FuseCallback(); or leave it out."
)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer of an engine, or of a Trainer without one, inside accelerate's wrapper."""
    while not hasattr(optimizer, "metrics") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _fused(optimizer: RuleOptimizer) -> FusedBackward | None:
    """What steps the parameters of an optimizer inside backward."""
    return next(iter(owners.of(optimizer.group_of)), None)


def _metrics(optimizer: Any) -> dict[str, float]:
    """The metrics of the last step of a Trainer's engine, or of ``FuseCallback``."""
    own = _unwrapped(optimizer)
    if hasattr(own, "metrics"):
        return dict(own.metrics())
    fused = _fused(own)
    return {} if fused is None else fused.metrics


class FuseCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Makes HF Trainer step inside backward without DeepSpeed: in one process, or under FSDP2.

    ``Trainer(..., optimizer_cls_and_kwargs=(ds_ext.AdaLomo, {"lr": 1e-3}),
    callbacks=[ds_ext.FuseCallback()])``. Several ranks need FSDP2, which accelerate or transformers
    applies. Trainer's ``max_grad_norm`` and ``gradient_accumulation_steps`` are honoured exactly.

    Args:
        gradient_policy: see ``fuse_into_backward``. The default None selects "sharded" if Trainer
            clips, or accumulates in one process, else "fused". "sharded" keeps this rank's part of
            the gradients in fp32 until the step.
        bucket_size: the bucket size in elements; see ``fuse_into_backward``.

    Raises:
        ValueError: when training begins, if several ranks hold the whole model; or if the policy is
            "fused" and Trainer clips, or accumulates in one process.
        TypeError: the optimizer is not a ds_ext optimizer, or DeepSpeed trains the model.
    """

    def __init__(
        self, gradient_policy: PolicyName | None = None, bucket_size: int | None = None
    ) -> None:
        self.gradient_policy = gradient_policy
        self.bucket_size = bucket_size
        self.fused: FusedBackward | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **given: Any
    ) -> None:
        """Fuses the model and optimizer that Trainer has prepared."""
        if getattr(args, "deepspeed_plugin", None):
            raise TypeError(
                "ds_ext.FuseCallback is for training without DeepSpeed, whose engine steps inside "
                "backward by itself with an optimizer of ds_ext: remove the callback."
            )
        if args.world_size > 1 and not fully_shard.uses_fsdp2(model):
            raise ValueError(
                "ds_ext.FuseCallback: several ranks train a model that FSDP2 has not cut. Set "
                'fsdp_config={"version": 2, ...} of TrainingArguments or fsdp_version: 2 of '
                "accelerate's config, or load the model with distributed_config=...; or use "
                "DeepSpeed."
            )
        reason = _reason_to_keep_gradients(args, model)
        policy: PolicyName = self.gradient_policy or ("sharded" if reason else "fused")
        if reason and policy == "fused":
            raise ValueError(
                f'ds_ext.FuseCallback(gradient_policy="fused"): {reason}, or leave gradient_policy '
                "out."
            )
        self.fused = fuse_into_backward(
            model,
            given["optimizer"],
            bucket_size=self.bucket_size,
            max_grad_norm=args.max_grad_norm or 0.0,
            gradient_policy=policy,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Removes the hooks from the model."""
        if self.fused is not None:
            self.fused.remove()


def _reason_to_keep_gradients(args: Any, model: Any) -> str:
    """The reason to keep gradients until the step; "" if there is none."""
    if args.max_grad_norm:
        return (
            f"max_grad_norm = {args.max_grad_norm:g} would need a second backward pass, which "
            "Trainer does not make. Set max_grad_norm=0"
        )
    steps = args.gradient_accumulation_steps
    if steps > 1 and not fully_shard.uses_fsdp2(model):  # FSDP2 accumulates micro-batches itself
        return (
            f"gradient_accumulation_steps = {steps} needs the gradients of all micro-batches. Set "
            "gradient_accumulation_steps=1"
        )
    return ""
