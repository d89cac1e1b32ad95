"""The adapter to DeepSpeed's engine: its protocol for a ZeRO optimizer, at every stage."""

import contextlib
import itertools
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.checkpointing import CheckpointFunction
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import get_comm_dtype
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor

from ds_ext.backward import rehearsal, start
from ds_ext.backward.gradients import FusedBackward
from ds_ext.config import gradients, offload, refused
from ds_ext.distributed import consensus
from ds_ext.distributed.layout import Layout
from ds_ext.engine import (
    absent,
    autotp,
    expert_parallel,
    leftovers,
    pipeline,
    safe_access,
    settings,
)
from ds_ext.engine.autotp import unpartitioned_shape
from ds_ext.engine.checkpoint_contents import Contents, stepped
from ds_ext.engine.layouts import layout_of
from ds_ext.engine.log import log, show, warn
from ds_ext.engine.moved_states import MovedStates
from ds_ext.engine.zero3 import Partitions
from ds_ext.optimizer import RuleOptimizer, host_offload
from ds_ext.optimizer.host_offload import HostOffload


class ZeroAdapter(ZeROOptimizer):  # type: ignore[misc]  # deepspeed has no types
    """DeepSpeed's protocol of a ZeRO optimizer, spoken for an optimizer that steps inside backward.

    An engine has it as ``engine.optimizer``, at every ZeRO stage.

    Args:
        engine: its engine, with the model on its device.
        optimizer: the one that is stepped, checked by ``refusals``.

    Raises:
        ValueError: for settings and parameters that cannot be trained together.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
        super().__init__()
        self.engine = engine
        self.optimizer = optimizer
        self.module = engine.module
        self.layout = layout_of(engine)
        self.dp_process_group = self.layout.copy_group  # by which DeepSpeed names files
        _share_time_limit(self.layout)
        config = settings.effective(engine)
        how = gradients.read(config, engine.monitor.enabled, pipeline.keeps(engine))
        self._prepare_optimizer(config["zero_optimization"].get("offload_optimizer"))
        self.fused = FusedBackward(
            engine.module,
            optimizer,
            self.layout,
            replace(how, average=engine.gradient_average, overlap=bool(engine.zero_overlap_comm())),
            self._comm_dtype,
            self._is_boundary,
        )
        self.fused.leave = self._leave
        self.fused.unseen = self._unseen_by_engine
        self.fused.discarded = self._discarded
        self.moved = MovedStates(self.fused)
        self.loss_scaler = settings.loss_scaler(engine)
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._entered = -1  # the last backward pass from outputs of the engine, by autograd's count
        self._rehearsing = False
        self._can_repeat = False  # whether a graph of the model was seen to run backward twice
        self._take_over_from_engine()
        leftovers.hide_from_copies(engine)
        safe_access.give(self.fused)

    def tell(self) -> None:
        """Says in the log how the engine trains, once its scheduler is known to fit."""
        config, how = settings.effective(self.engine), self.fused.how
        where = f"ZeRO stage {int(self.engine.zero_optimization_stage())}"
        if pipeline.is_pipeline(self.engine):
            where += f", the first of {self.engine.module.num_pipeline_stages()} stages"
        show(start.line(self.optimizer, self.layout, how, where))
        for line in gradients.report(how, config):
            log(f"{type(self.optimizer).__name__}: {line}")
        told = config | settings.effective(self.engine)
        for line in (*refused.without_effect(told), *offload.without_effect(told)):
            log(line)
        warnings = consensus.gathered(list(start.warnings(self.optimizer, self.layout)))
        for warning in dict.fromkeys(itertools.chain(*warnings)):
            warn(warning)

    def _prepare_optimizer(self, section: dict[str, Any] | None) -> None:
        """Tells the optimizer of its parameters what only the engine knows."""
        optimizer = self.optimizer
        optimizer.offload = HostOffload.from_config(section or {})
        optimizer.index_parameters()  # DeepSpeed may have replaced those of experts
        if pipeline.is_pipeline(self.engine):
            pipeline.number(self.engine, optimizer)
        places = {p: expert_parallel.place(p) for p in self.layout.names}
        firsts = {p: place[0] for p, place in places.items() if place}
        optimizer.separate_experts(self.module, firsts, unpartitioned_shape)

    def _take_over_from_engine(self) -> None:
        """Switches off the engine's and ZeROOptimizer's own scaling, reduction and clipping."""
        self.custom_loss_scaler = False
        self.torch_autocast_gradscaler = None
        self.engine.torch_autocast_z0_gradscaler = None
        self.engine.enable_backward_allreduce = False
        self.engine._config.gradient_clipping = 0.0

    loss_scale = cur_scale = property(lambda self: self.loss_scaler.loss_scale)
    dynamic_loss_scale = property(lambda self: self.loss_scaler.dynamic)
    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    bit16_groups = fp16_groups = property(lambda self: [g["params"] for g in self.param_groups])

    defaults = property(lambda self: self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says what to use where DeepSpeed's optimizers have it."""
        raise absent.attribute(name)

    def get_lr(self) -> float:
        """Returns the learning rate of the first param group."""
        return cast(float, self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Makes ``lr`` the learning rate of all param groups from the next step on."""
        for group in self.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Raises RuntimeError: it is the engine's that is to be called."""
        raise RuntimeError(absent.BACKWARD)

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Does nothing, for ``engine.allreduce_gradients()``: they are reduced inside backward."""

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """What gathers the parameters at stage 3; trainers that generate take its hooks off for it.

        Raises:
            AttributeError: at other stages, where DeepSpeed's own optimizers have none either.
        """
        if isinstance(self.layout, Partitions):
            return self.layout.offload
        raise AttributeError("optimizer.parameter_offload is there at zero_optimization.stage 3.")

    def _comm_dtype(self, param: Tensor) -> torch.dtype:
        """What the gradient of a parameter is reduced in."""
        engine = self.engine
        if engine.torch_autocast_enabled():
            return cast(torch.dtype, get_comm_dtype(param))
        if param.dtype == torch.float64 and engine._config.communication_data_type is None:
            return torch.float64  # DeepSpeed's choice is fp32 for all but 16 bits
        return cast(torch.dtype, engine.communication_data_type)

    def _is_boundary(self) -> bool:
        engine = self.engine
        return bool(engine.is_gradient_accumulation_boundary() and not engine.inside_no_sync_ctxt)

    def needs_scaler(self) -> bool:
        """Returns whether a loss has to be multiplied before it is run backward."""
        return bool(self.loss_scale != 1)

    def scale_if_loss(self, value: Any) -> Any:
        """Returns the loss times the loss scale, on which gradients were measured if need be.

        Called by engine.backward and engine.scale before they run, or return, it backward.
        """
        self.fused.check_owner()
        loss = self.loss_scaler.scale_loss(value)
        self.fused.loss_scale = self.loss_scale
        if self.fused.must_measure:
            self._check_can_repeat(loss)
            self.fused.rehearse(loss)
        return loss

    def _check_can_repeat(self, loss: Tensor) -> None:
        """Raises RuntimeError, in the first step, if the graph cannot be run backward twice."""
        if not self._can_repeat:
            _refuse_to_repeat(loss)
            self._can_repeat = True

    @contextlib.contextmanager
    def _unseen_by_engine(self, loss: Tensor) -> Iterator[None]:
        """A backward pass of ``loss`` within is not taken for the one that ends in a step."""
        state = self._backward_hook_state
        hooks, state._grad_acc_post_hooks = state._grad_acc_post_hooks, []
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            state._grad_acc_post_hooks = hooks
        self._tell_of_second_pass(loss)

    def _tell_of_second_pass(self, loss: Tensor) -> None:
        """Makes the engine's hooks run in the next backward pass too, not in a graph's first."""
        self._backward_hook_state.post_backward_callback_queued = False
        loss.register_hook(self._announce)

    def _announce(self, grad: Tensor) -> None:
        """A hook, which returns no other gradient."""
        self.queue_post_backward_callback()

    def backward_prologue(self) -> None:
        """Called when a backward pass begins from outputs of the engine.

        Raises:
            RuntimeError: for a loss that has to be multiplied by the loss scale and was not.
        """
        self.fused.check_owner()
        self.fused.loss_scale = self.loss_scale  # a stage of a pipeline may have no loss
        engine = self.engine
        scaled = engine._running_engine_backward or engine._manual_backward_expected
        if self.needs_scaler() and not (scaled or self._rehearsing):
            raise RuntimeError(
                f"the loss has to be multiplied by the loss scale ({self.loss_scale:g}) of fp16: "
                "call engine.backward(loss), or engine.scale(loss).backward()."
            )

    def enter_backward(self) -> None:
        """Called for each forward pass of the engine that a backward pass reaches.

        DeepSpeed calls ``exit_backward`` once for each backward pass. So only the first of these
        calls counts: after a loss of two forward passes the depth would stay 1, which is how
        ``_discarded`` knows a backward pass that was abandoned.
        """
        task = torch._C._current_graph_task_id()
        if task != self._entered:
            self._entered = task
            self._backward_active_depth = 0  # more, if the last backward pass was abandoned
            self.clear_backward_seen_flag()
            super().enter_backward()

    def backward_epilogue(self, **_: Any) -> None:
        """Called when a backward pass has ended, of engine.backward(loss) or loss.backward()."""
        self.fused.finish()
        self.layout.end_backward()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing is left to do where the caller manages accumulation: ``step`` ends it."""

    def step(self, closure: None = None) -> None:
        """Ends a step, most of which was made in backward; a second call changes nothing.

        Raises:
            ValueError: for a ``closure``.
        """
        if closure is not None:
            raise ValueError("engine.step() takes no closure: the update happens in backward.")
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for a step, made in backward
        self.fused.finish()
        result = self.fused.end_step()
        self.overflow = result is not None and result.skipped
        if result is None:
            return
        host_offload.synchronize(self.layout.device)
        self._global_grad_norm = result.norm
        if self.dynamic_loss_scale:
            self.loss_scaler.update_scale(result.overflow)
        self.layout.end_step()
        self._write_events()

    def metrics(self) -> dict[str, float]:
        """Returns what is known of the last step: see docs/settings.md, "Step metrics"."""
        return self.fused.metrics | {"loss_scale": self.loss_scale}

    def measure_updates(self) -> None:
        """Makes ``metrics`` tell the RMS of updates and weights from the next step on."""
        self.fused.measure_updates()

    def _write_events(self) -> None:
        """Sends the metrics to DeepSpeed's monitors (TensorBoard, W&B, CSV)."""
        engine = self.engine
        if engine.monitor.enabled and engine.global_rank == 0:
            samples = engine.global_samples + engine.train_batch_size()
            events = [(f"Train/Samples/{k}", v, samples) for k, v in self.metrics().items()]
            engine.monitor.write_events(events)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Gives the optimizer further parameters.

        Raises:
            ValueError: for one that is not part of the engine's module.
        """
        self.optimizer.add_param_group(param_group)
        if pipeline.is_pipeline(self.engine):
            pipeline.number(self.engine, self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the step in progress: see ``FusedBackward.discard``. All ranks call it."""
        self.optimizer.zero_grad(set_to_none)

    def _discarded(self, had_begun: bool) -> None:
        """A step in progress was dropped, perhaps in the middle of a backward pass."""
        state = self._backward_hook_state
        if not had_begun and not state.backward_active_depth:
            return  # between steps, or between forward and backward
        state.backward_active_depth = 0
        self.clear_backward_seen_flag()
        self.layout.discard()
        engine, steps = self.engine, self.engine.gradient_accumulation_steps()
        if settings.counts_micro_batches(engine) and engine.micro_steps % steps:
            log("zero_grad() discards the micro-batches of this step so far: it begins anew")
            engine.micro_steps -= engine.micro_steps % steps
        engine._unmanaged_backward_count = 0

    # For zero_to_fp32.py: runs of one parameter by all ranks are what it puts together.
    round_robin_bit16_groups = property(lambda self: [[p] for p in stepped(self.fused)])

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint, which DeepSpeed's engine writes to a file."""
        return Contents(self.engine, self.fused, self.loss_scaler).save()

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Raises RuntimeError: ``engine.load_checkpoint`` loads state and weights together."""
        raise RuntimeError("the optimizer is loaded by engine.load_checkpoint, with the weights.")

    def checkpoint_event_prologue(self) -> None:
        """Called before weights are saved or loaded: nothing is gathered then."""
        self.empty_partition_cache()

    def checkpoint_event_epilogue(self) -> None:
        """Called after DeepSpeed has loaded weights: gathers what stays gathered."""
        self.layout.end_step()

    def empty_partition_cache(self) -> None:
        """Partitions the parameters that ZeRO-3 has gathered."""
        if isinstance(self.layout, Partitions):
            self.layout.offload.empty_partition_cache()

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves weights, states and kept gradients to the host: see ``MovedStates.offload``.

        Copies to the host are waited for, ``non_blocking`` or not.
        """
        self.fused.check_owner()
        self.moved.offload(include, device, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves back to the device what ``offload_states`` has moved, and waits for that."""
        self.moved.reload()

    def destroy(self) -> None:
        """Takes our hooks and attributes off the model."""
        self.fused.remove()
        safe_access.take(self.fused)
        if isinstance(self.layout, Partitions):
            self.layout.offload.destroy()

    def _leave(self) -> None:
        """Takes all hooks off the model, so that it does not hold on to this engine."""
        self.destroy()
        leftovers.leave(self.engine)


def _share_time_limit(layout: Layout) -> None:
    """Makes the layout's groups wait as long as the group of all ranks was told to.

    DeepSpeed makes its groups with torch's default, half an hour.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    distributed: Any = dist  # set_timeout is new in torch 2.15, which warns of its older name
    set_timeout = getattr(distributed, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in layout.groups | expert_parallel.exchanges() | autotp.exchanges():
        limit = everyone._get_backend(layout.device).options._timeout
        set_timeout(limit, group)


def _refuse_to_repeat(loss: Tensor) -> None:
    """Raises RuntimeError if the graph of ``loss`` cannot be run backward twice."""
    for node in rehearsal.nodes(loss):
        if getattr(node, "_forward_cls", None) is CheckpointFunction:
            raise RuntimeError(
                "gradient_clipping: deepspeed.checkpointing forgets its inputs in the first "
                "backward pass, so that gradients cannot be measured before they are used. Use "
                'torch.utils.checkpoint, or set "ds_ext": {"gradient_policy": "sharded"}, or '
                '"gradient_clipping": 0.'
            )
