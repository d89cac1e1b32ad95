"""The adapter to DeepSpeed: registration by name, and its protocol for a ZeRO optimizer.

``register()`` teaches DeepSpeedEngine three things: that our names are optimizers, how to build
one from the JSON config, and that ours is wrapped in ``ZeroAdapter`` and not in DeepSpeed's own
stage-3 optimizer, whose fp32 copies of weights and gradients are what we exist to avoid.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import Tensor

from ds_ext import checkpoint, settings
from ds_ext.gradients import FusedBackward, logger
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.shard import Shard


class Partitions:
    """ZeRO-3's layout: this rank's run of a parameter is its ``ds_tensor``, less the padding."""

    def __init__(self, group: torch.distributed.ProcessGroup, names: dict[Tensor, str]) -> None:
        self.group = group
        self.names = names
        self.rank = torch.distributed.get_rank(group)
        self.world = torch.distributed.get_world_size(group)

    def shard(self, param: Tensor) -> Shard:
        return Shard.of_rank(tuple(param.ds_shape), self.rank, self.world)

    def run(self, param: Tensor) -> Tensor:
        return param.ds_tensor[: len(self.shard(param))]

    def name(self, param: Tensor) -> str:
        return self.names.get(param, "a parameter outside the model")


class ZeroAdapter(ZeROOptimizer):
    """What DeepSpeedEngine talks to: it drives a RuleOptimizer on ZeRO-3's partitions."""

    def __init__(self, engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.module = engine.module
        self.dp_process_group = engine.seq_data_parallel_group
        self.parameter_offload = _partition(engine)
        self.layout = Partitions(self.dp_process_group, engine.param_names)
        self.fused = FusedBackward(
            engine.module,
            optimizer,
            self.layout,
            bucket_size=settings.bucket_size(engine._config._param_dict),
            comm_dtype=engine.communication_data_type,
            average=engine.gradient_average,
        )
        self.overflow = False
        self._global_grad_norm: float | None = None
        # Read by the engine and by ZeROOptimizer; there is no loss scaling.
        self.custom_loss_scaler = False
        self.torch_autocast_gradscaler = None
        self.loss_scale = self.cur_scale = 1.0

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    fp16_groups = property(lambda self: [g["params"] for g in self.param_groups])

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Backward has ended, with engine.backward(loss) and with loss.backward()."""
        self.fused.finish()

    def backward_epilogue(self, **_: Any) -> None:
        # A module fed by no-grad inputs gets no post-backward hook: its weight is still gathered.
        self.parameter_offload.release_backward_leftovers()

    def step(self, closure: None = None) -> None:
        """Finalises a step whose updates were made in backward; a second call changes nothing."""
        if closure is not None:
            raise ValueError("engine.step() takes no closure: the update happens in backward.")
        norm = self.fused.take_norm()
        if norm is not None:
            self._global_grad_norm = norm
            self._gather_again()

    def _gather_again(self) -> None:
        """Brings the parameters that ZeRO-3 keeps gathered up to date with their partitions."""
        self.parameter_offload.partition_all_parameters()
        persistent = self.parameter_offload.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def state_dict(self) -> dict[str, Any]:
        layout = self.layout
        return checkpoint.save(self.optimizer, layout.names, self._runs(), layout.world)

    def load_state_dict(
        self,
        state_dict_list: list[Any],
        load_optimizer_states: bool = True,
        checkpoint_folder: str | None = None,
        **_: Any,
    ) -> None:
        """Loads this rank's part of a checkpoint; DeepSpeed's further arguments are of its own."""
        if checkpoint_folder is not None:
            raise ValueError(
                "ds_ext cannot load a universal checkpoint yet: remove checkpoint.load_universal."
            )
        layout = self.layout
        saved = state_dict_list[layout.rank]
        runs = self._runs()
        checkpoint.load(
            saved, self.optimizer, layout.names, runs, layout.world, load_optimizer_states
        )
        self._gather_again()

    def _runs(self) -> dict[str, Tensor]:
        layout = self.layout
        return {name: layout.run(p) for p, name in layout.names.items()}

    def checkpoint_event_prologue(self) -> None:
        self.parameter_offload.partition_all_parameters()

    checkpoint_event_epilogue = _gather_again

    def empty_partition_cache(self) -> None:
        self.parameter_offload.empty_partition_cache()

    def destroy(self) -> None:
        self.fused.remove()
        self.parameter_offload.destroy()


def _partition(engine: DeepSpeedEngine) -> DeepSpeedZeRoOffload:
    """DeepSpeed's own partitioning, gathering and prefetching of ZeRO-3 parameters."""
    return DeepSpeedZeRoOffload(
        engine.module,
        timers=engine.timers,
        ds_config=engine.config,
        overlap_comm=engine.zero_overlap_comm(),
        prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
        max_reuse_distance=engine.zero_max_reuse_distance(),
        max_live_parameters=engine.zero_max_live_parameters(),
        param_persistence_threshold=engine.zero_param_persistence_threshold(),
        model_persistence_threshold=engine.zero_model_persistence_threshold(),
        dp_process_group=engine.seq_data_parallel_group,
        mpu=engine.mpu,
        zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
        log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
    )


def _build(engine: DeepSpeedEngine, params: list[Any]) -> RuleOptimizer:
    """The optimizer that the JSON config names, over groups that spare norms and biases."""
    optimizer_type = OPTIMIZERS[engine.optimizer_name()]
    given = dict(engine.optimizer_params() or {})
    grouped = bool(params) and isinstance(params[0], dict)
    if given.get("weight_decay") and not grouped:
        checked = optimizer_type([torch.zeros(0)], **given).defaults
        groups = settings.decay_groups(engine.module, params, checked["weight_decay"])
        params = [group for group in groups if group["params"]]
        _log(_decay_report(engine, params))
    return optimizer_type(params, **given)


def _decay_report(engine: DeepSpeedEngine, groups: list[dict[str, Any]]) -> str:
    def names(decayed: bool) -> str:
        chosen = [g["params"] for g in groups if bool(g["weight_decay"]) == decayed]
        return settings.summary(engine.param_names[p] for params in chosen for p in params)

    decay = groups[0]["weight_decay"]
    return f"weight decay {decay} on: {names(True)}; no weight decay on: {names(False)}"


def _refuse(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Raises ValueError for what this engine was asked to do and ds_ext cannot."""
    settings.refuse(engine._config._param_dict | _effective(engine))
    if isinstance(engine.module, PipelineModule):
        raise ValueError("ds_ext does not support PipelineModule: pass a plain nn.Module.")
    if engine.has_moe_layers:
        raise ValueError("ds_ext does not support deepspeed.moe layers yet.")
    scheduled = engine.client_lr_scheduler is not None or engine.scheduler_name() is not None
    if scheduled and any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            "Adafactor: optimizer.params.relative_step=true computes its own step size, so there "
            'is no lr for a scheduler to set. Set "relative_step": false and an "lr" (HF Trainer '
            "always has a scheduler), or remove the scheduler."
        )


def _effective(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Settings that DeepSpeed derives or that have more than one spelling."""
    config = engine._config._param_dict
    zero = config.get("zero_optimization", {})
    return {
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "sequence_parallel_size": engine.sequence_parallel_size,
        "zero_optimization": zero | {"stage": int(engine.zero_optimization_stage())},
    }


def _log(message: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.info(message)


def register() -> None:
    """Makes DeepSpeedEngine build and drive our optimizers; calling it again changes nothing."""
    if getattr(DeepSpeedEngine, "_ds_ext", False):
        return
    DeepSpeedEngine._ds_ext = True
    DEEPSPEED_OPTIMIZERS.extend(name for name in OPTIMIZERS if name not in DEEPSPEED_OPTIMIZERS)
    _accept_scalars()
    build, check, wrap = (
        DeepSpeedEngine._configure_basic_optimizer,
        DeepSpeedEngine._do_optimizer_sanity_check,
        DeepSpeedEngine._configure_zero_optimizer,
    )

    @functools.wraps(build)
    def _configure_basic_optimizer(self: DeepSpeedEngine, model_parameters: list[Any]) -> Any:
        ours = self.optimizer_name() in OPTIMIZERS
        return (_build if ours else build)(self, model_parameters)

    @functools.wraps(check)
    def _do_optimizer_sanity_check(self: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        if not isinstance(basic_optimizer, RuleOptimizer):
            return check(self, basic_optimizer)
        _refuse(self, basic_optimizer)
        return ZERO_OPTIMIZATION

    @functools.wraps(wrap)
    def _configure_zero_optimizer(self: DeepSpeedEngine, optimizer: Any) -> Any:
        ours = isinstance(optimizer, RuleOptimizer)
        return ZeroAdapter(self, optimizer) if ours else wrap(self, optimizer)

    DeepSpeedEngine._configure_basic_optimizer = _configure_basic_optimizer
    DeepSpeedEngine._do_optimizer_sanity_check = _do_optimizer_sanity_check
    DeepSpeedEngine._configure_zero_optimizer = _configure_zero_optimizer


def _accept_scalars() -> None:
    """Lets DeepSpeed 0.19 take 0-d parameters: it broadcasts bytes, as which they have no view."""
    broadcast, convert, leave = (
        DeepSpeedEngine._broadcast_model,
        Init._zero_init_param,
        GatheredParameters._exit,
    )

    @functools.wraps(broadcast)
    def _broadcast_model(self: DeepSpeedEngine) -> None:
        with _as_vectors(self.module.parameters()):
            broadcast(self)

    @functools.wraps(convert)
    def _zero_init_param(self: Init, param: Tensor) -> None:
        shape = param.shape
        with _as_vectors([param]):
            convert(self, param)
        param.ds_shape = shape  # in which it is gathered

    @functools.wraps(leave)
    def _exit(self: GatheredParameters, *error: Any) -> None:
        with _as_vectors(self.params if self.enabled else []):
            leave(self, *error)

    DeepSpeedEngine._broadcast_model = _broadcast_model
    Init._zero_init_param = _zero_init_param
    GatheredParameters._exit = _exit


@contextlib.contextmanager
def _as_vectors(params: Iterable[Tensor]) -> Iterator[None]:
    """Gives 0-d parameters one dimension within the context."""
    scalars = [p for p in params if p.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    yield
    for param in scalars:
        if param.numel():  # not partitioned meanwhile
            param.data = param.data.view(())
