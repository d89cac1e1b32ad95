"""Adapter that implements DeepSpeed's ZeRO optimizer protocol at every ZeRO stage."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import get_comm_dtype
from torch import Tensor

from ds_ext import logs
from ds_ext.backward import error_texts, startup_log, streams
from ds_ext.backward.buckets import ENDED
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.backward.module_hooks import Hook
from ds_ext.config import config_checks, parsing
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import with_attribute
from ds_ext.engine import deepspeed_config, engine_settings, expert_parallel, pipeline, safe_access
from ds_ext.engine.checkpoint_contents import Contents, stepped
from ds_ext.engine.hook_cleanup import remove_hooks
from ds_ext.engine.layouts import layout_of, share_time_limit
from ds_ext.engine.offload_states import OffloadedStates
from ds_ext.engine.parameters import unpartitioned_shape
from ds_ext.engine.rank_logging import log, warn
from ds_ext.engine.zero3 import Zero3Layout
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.host_offload import HostOffload


class ZeroAdapter(ZeROOptimizer):  # type: ignore[misc]  # deepspeed has no types
    """Implements DeepSpeed's ZeRO optimizer protocol for an optimizer that steps inside backward.

    The adapter is ``engine.optimizer`` at every ZeRO stage. The engine's model is already on the
    device.

    Raises:
        ValueError: the settings do not support these parameters.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
        super().__init__()
        self.engine = engine
        self.optimizer = optimizer
        self.module = engine.module
        self.layout = layout_of(engine)
        self.dp_process_group = self.layout.group  # DeepSpeed uses it in file names
        self.zero3 = self.layout if isinstance(self.layout, Zero3Layout) else None
        if self.zero3 is not None:  # trainers remove its hooks during generation
            self.parameter_offload = self.zero3.offload
        share_time_limit(engine)
        config = engine_settings.effective(engine)
        kept_for, overlap = pipeline.gradients_kept_for(engine), bool(engine.zero_overlap_comm())
        grad_config = parsing.gradients(config, engine.monitor.enabled, kept_for)
        if engine_settings.is_filled_in(engine, grad_config.bucket_size):
            grad_config = replace(grad_config, bucket_size=None)
        # Offload, parameter numbers and experts, which only the engine knows.
        offload = config["zero_optimization"].get("offload_optimizer")
        optimizer.offload = HostOffload.from_config(offload or {})
        optimizer.index_parameters()  # DeepSpeed may have replaced expert parameters
        pipeline.number_parameters(engine, optimizer)
        positions = {p: expert_parallel.stack_position(p) for p in self.layout.names}
        firsts = {p: position[0] for p, position in positions.items() if position}
        optimizer.separate_experts(self.module, firsts, unpartitioned_shape)
        self.fused = FusedBackward(
            engine.module,
            optimizer,
            self.layout,
            replace(grad_config, average=engine.gradient_average, overlap=overlap, has_engine=True),
            self._comm_dtype,
            lambda: engine.is_gradient_accumulation_boundary() and not engine.inside_no_sync_ctxt,
            on_replaced=self.destroy,
            on_discarded=self._discarded,
            rerun_context=self._suspend_engine_hooks,
        )
        self.offloaded = OffloadedStates(self.fused)
        self.loss_scaler = engine_settings.loss_scaler(engine)
        self.overflow = False
        self.is_stepping = False  # whether the engine's own step calls ``step``
        self._global_grad_norm: float | None = None
        self._entered = -1  # graph task id of the engine's last backward pass
        self._is_prepass = False
        engine.torch_autocast_z0_gradscaler = None  # the adapter scales the loss, and clips
        engine._config.gradient_clipping = 0.0
        for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hooks = handle.hooks_dict_ref()
            hooks[handle.id] = Hook(hooks[handle.id])  # copies of the model have no engine
        safe_access.attach(self.fused)

    def log_start(self) -> None:
        """Logs the training setup and its warnings. Call it after the scheduler was checked."""
        config, grad_config = engine_settings.effective(self.engine), self.fused.grad_config
        where = f"ZeRO stage {int(self.engine.zero_optimization_stage())}"
        if pipeline.is_pipeline(self.engine):
            where += f", the first of {self.engine.module.num_pipeline_stages()} stages"
        if consensus.is_first():  # with any logging configuration
            logs.show(startup_log.line(self.optimizer, self.layout, grad_config, where))
        for line in parsing.log_lines(grad_config, self.fused.buckets.size, config):
            log(f"{type(self.optimizer).__name__}: {line}")
        for line in config_checks.ignored(config, self.optimizer):
            log(line)
        for line in deepspeed_config.unknown(self.engine._config._param_dict):
            warn(line)
        warnings = consensus.gathered(list(startup_log.warnings(self.optimizer, self.layout)))
        for warning in dict.fromkeys(itertools.chain(*warnings)):
            warn(warning)

    loss_scale = cur_scale = property(lambda self: self.loss_scaler.loss_scale)
    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    bit16_groups = fp16_groups = property(lambda self: [g["params"] for g in self.param_groups])
    defaults = property(lambda self: self.optimizer.defaults)
    measure_updates = property(lambda self: self.optimizer.measure_updates)
    offload_states = property(lambda self: self.offloaded.offload)
    reload_states = property(lambda self: self.offloaded.reload)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which names the page that lists what an engine offers."""
        raise AttributeError(
            f"engine.optimizer of ds_ext has no {name}: docs/engine-api.md lists what it has, and "
            "what to use instead."
        )

    def get_lr(self) -> float:
        """Returns the learning rate of the first param group."""
        return cast(float, self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all param groups, from the next step on."""
        for group in self.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Raises RuntimeError. Call ``engine.backward`` instead."""
        raise RuntimeError("engine.optimizer.backward(loss): call engine.backward(loss).")

    def _comm_dtype(self, param: Tensor) -> torch.dtype:
        """The dtype in which the gradient of a parameter is reduced."""
        engine = self.engine
        if engine.torch_autocast_enabled():
            return cast(torch.dtype, get_comm_dtype(param))
        if param.dtype == torch.float64 and engine._config.communication_data_type is None:
            return torch.float64  # DeepSpeed would choose fp32
        return cast(torch.dtype, engine.communication_data_type)

    def needs_scaler(self) -> bool:
        """Returns whether a loss must be multiplied by the loss scale before backward."""
        return bool(self.loss_scaler.loss_scale != 1)

    def scale_if_loss(self, value: Any) -> Any:
        """Returns the loss times the loss scale. ``engine.backward`` and ``engine.scale`` call it.

        If clipping needs the gradient norm, it first runs a backward pass that measures the norm.
        """
        loss = self.loss_scaler.scale_loss(value)
        self.fused.reader.loss_scale = self.loss_scaler.loss_scale
        self.fused.measure_norm(loss)
        return loss

    @contextlib.contextmanager
    def _suspend_engine_hooks(self, loss: Tensor) -> Iterator[None]:
        """Context in which the engine's hooks ignore a backward pass of ``loss``."""
        state, entered = self._backward_hook_state, self._entered
        with (
            self.zero3.norm_prepass() if self.zero3 else contextlib.nullcontext(),
            with_attribute(state, "_grad_acc_post_hooks", []),
            with_attribute(self, "_is_prepass", True),
        ):
            yield
        if self._entered != entered:  # the loss is of this engine, and not only of others
            # Makes the engine's hooks run again in the second backward pass of a graph.
            state.post_backward_callback_queued = False
            loss.register_hook(self._announce)

    def _announce(self, grad: Tensor) -> None:
        """Gradient hook that queues the engine's callback and keeps the gradient."""
        self.queue_post_backward_callback()

    def backward_prologue(self) -> None:
        """Called by the engine when a backward pass begins.

        Raises:
            RuntimeError: the loss was not multiplied by the loss scale, or the pass makes a graph
                of gradients that would be wrong.
        """
        self.fused.check_owner()
        engine, reason = self.engine, ""
        if engine.zero_optimization_stage() == 3:
            reason = "at ZeRO stage 3, which frees a layer's weights after its first backward pass"
        elif engine.gradient_accumulation_steps() > 1:
            reason = "with gradient_accumulation_steps > 1, because DeepSpeed divides by it twice"
        if reason and torch.is_grad_enabled():
            raise RuntimeError(
                "torch.autograd.grad(..., create_graph=True), as for a gradient penalty, is not "
                f"supported {reason}. Use a stage below 3 and gradient_accumulation_steps = 1, or "
                "ds_ext.fuse_into_backward without DeepSpeed's engine."
            )
        # A stage of a pipeline may have no loss.
        self.fused.reader.loss_scale = self.loss_scaler.loss_scale
        scaled = engine._running_engine_backward or engine._manual_backward_expected
        if self.needs_scaler() and not (scaled or self._is_prepass):
            raise RuntimeError(
                f"fp16 requires loss scaling (current scale {self.loss_scale:g}): "
                "call engine.backward(loss), or engine.scale(loss).backward(). If one loss is of "
                f"two engines with fp16: {error_texts.NO_SCALES}"
            )

    def enter_backward(self) -> None:
        """Called by the engine for each forward pass that a backward pass reaches.

        Only the first call in a backward pass counts. A loss of two forward passes calls this
        twice but ``exit_backward`` once; counting both would look like an abandoned backward pass.
        """
        task = torch._C._current_graph_task_id()
        if task != self._entered:
            self._entered = task
            self._backward_active_depth = 0  # nonzero after an abandoned backward pass
            self.clear_backward_seen_flag()
            super().enter_backward()

    def backward_epilogue(self, **_: Any) -> None:
        """Called by the engine after engine.backward(loss) or loss.backward()."""
        self.fused.finish()
        if self.zero3 is not None:
            self.zero3.end_backward()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Does nothing: ``step`` ends gradient accumulation that the caller manages."""

    def step(self, closure: None = None) -> None:
        """Finishes the step that backward has begun. A second call has no effect.

        Raises:
            ValueError: a ``closure`` was given.
            RuntimeError: the program calls it, and not the engine.
        """
        if closure is not None:
            raise ValueError("engine.step() takes no closure: the update happens in backward.")
        if not self.is_stepping:
            raise RuntimeError(
                "engine.optimizer.step() was called: call engine.step() after each micro-batch. It "
                "also counts micro-batches and steps the scheduler."
            )
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
        self.fused.buckets.note(ENDED)  # a rank that has skipped backward is here before others
        self.fused.finish(ends_step=True)
        result = self.fused.end_step()
        self.overflow = result is not None and result.skipped
        if result is None:
            return
        streams.synchronize(self.layout.device)
        self._global_grad_norm = result.norm
        if self.loss_scaler.dynamic:
            self.loss_scaler.update_scale(result.overflow)
        self.layout.end_step()
        engine = self.engine
        if engine.monitor.enabled and engine.global_rank == 0:  # TensorBoard, W&B, CSV
            samples = engine.global_samples + engine.train_batch_size()
            found = self.metrics().items()
            engine.monitor.write_events([(f"Train/Samples/{k}", v, samples) for k, v in found])

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last step: see docs/settings.md, "Step metrics"."""
        return self.fused.metrics | {"loss_scale": self.loss_scale}

    def ema(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model has the averages of its weights: see ``FusedBackward.ema``."""
        self.offloaded.check()
        return self.fused.ema()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to the optimizer.

        Raises:
            ValueError: a parameter is not part of the engine's module.
        """
        self.optimizer.add_param_group(param_group)
        pipeline.number_parameters(self.engine, self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the step in progress: see ``FusedBackward.discard``. All ranks must call it.

        DeepSpeed calls it after ``step``, which leaves nothing to discard unless backward failed.
        """
        if self.fused.is_begun or self._backward_hook_state.backward_active_depth:
            self.optimizer.zero_grad(set_to_none)
            return
        self.fused.uses.forget(now=False)
        for param in self.optimizer.group_of:
            param.grad = None

    def _discarded(self, had_begun: bool) -> None:
        """Resets the engine after a step was discarded, possibly during a backward pass."""
        state = self._backward_hook_state
        if not had_begun and not state.backward_active_depth:
            return  # between steps, or between forward and backward
        if self.zero3 is not None:
            self.zero3.discard(state.backward_active_depth > 0)
        state.backward_active_depth = 0
        self.clear_backward_seen_flag()
        engine, steps = self.engine, self.engine.gradient_accumulation_steps()
        if engine.managed_gradient_accumulation() and engine.micro_steps % steps:
            log("the micro-batches of this step so far are discarded: the step starts again")
            engine.micro_steps -= engine.micro_steps % steps
        engine._unmanaged_backward_count = 0

    # One group per parameter: zero_to_fp32.py concatenates the runs of a group from all ranks.
    round_robin_bit16_groups = property(lambda self: [[p] for p in stepped(self.fused)])

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint, which DeepSpeed's engine writes to a file."""
        return Contents(self.engine).save()

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Raises RuntimeError: ``engine.load_checkpoint`` loads state and weights together."""
        raise RuntimeError("the optimizer is loaded by engine.load_checkpoint, with the weights.")

    def checkpoint_event_epilogue(self) -> None:
        """Gathers persistent parameters. The engine calls it after it has loaded weights."""
        self.layout.end_step()

    def empty_partition_cache(self) -> None:
        """Partitions the parameters that ZeRO-3 has gathered."""
        if self.zero3 is not None:
            self.zero3.offload.empty_partition_cache()

    checkpoint_event_prologue = empty_partition_cache  # before weights are saved or loaded

    def destroy(self) -> None:
        """Removes all hooks and attributes from the model, so that it does not hold this engine."""
        self.fused.remove()
        safe_access.detach(self.fused)
        if self.zero3 is not None:
            self.zero3.offload.destroy()
        remove_hooks(self.engine)
