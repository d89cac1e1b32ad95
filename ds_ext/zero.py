"""The adapter to DeepSpeed's engine: its protocol for a ZeRO optimizer, at every stage."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor

from ds_ext import checkpoint, settings
from ds_ext.gradients import FusedBackward, logger
from ds_ext.layout import Replicated, Sharded
from ds_ext.optimizer import RuleOptimizer
from ds_ext.shard import Shard


class Partitions(Sharded):
    """ZeRO-3's layout: a rank holds its run alone, ``ds_tensor`` less the padding."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.offload = _partition(engine)
        super().__init__(engine.seq_data_parallel_group, engine.param_names)

    def shard(self, param: Tensor) -> Shard:
        return Shard.of_rank(tuple(param.ds_shape), self.rank, self.world)

    def run(self, param: Tensor) -> Tensor:
        return param.ds_tensor[: len(self.shard(param))]

    def agree(self, params: Iterable[Tensor]) -> None:
        """They do: the ranks have gathered the same parameters together."""

    def publish(self, params: Iterable[Tensor]) -> None:
        """Nobody else holds the weight, but for what ``end_step`` gathers."""

    def end_backward(self) -> None:
        # A module fed by no-grad inputs gets no post-backward hook: its weight is still gathered.
        self.offload.release_backward_leftovers()

    def end_step(self) -> None:
        """Brings the parameters that ZeRO-3 keeps gathered up to date with their partitions."""
        self.offload.partition_all_parameters()
        persistent = self.offload.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def layout_of(engine: DeepSpeedEngine) -> Replicated:
    """The layout of the engine's ZeRO stage."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return Partitions(engine)
    kind = Replicated if stage == 0 else Sharded
    return kind(engine.seq_data_parallel_group, engine.param_names)


class ZeroAdapter(ZeROOptimizer):
    """What DeepSpeedEngine talks to: it drives a RuleOptimizer from hooks, at any ZeRO stage."""

    def __init__(self, engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.module = engine.module
        self.dp_process_group = engine.seq_data_parallel_group
        self.layout = layout_of(engine)
        engine.enable_backward_allreduce = False  # the hooks reduce gradients
        if engine._config._param_dict.get("gradient_clipping") is None:
            log(
                "gradient_clipping is not set: nothing is clipped (DeepSpeed's own optimizers "
                'would clip at its default, 1.0). Write "gradient_clipping": 0 to say so.'
            )
        engine._config.gradient_clipping = 0.0  # or the engine clips gradients that are gone
        self.fused = FusedBackward(
            engine.module,
            optimizer,
            self.layout,
            bucket_size=settings.bucket_size(engine._config._param_dict),
            comm_dtype=engine.communication_data_type,
            average=engine.gradient_average,
        )
        log(
            f"{type(optimizer).__name__}: buckets of {self.fused.bucket_size:,} gradient elements "
            "(zero_optimization.reduce_bucket_size)"
        )
        self.overflow = False
        self._global_grad_norm: float | None = None
        # Read by the engine and by ZeROOptimizer; there is no loss scaling.
        self.custom_loss_scaler = False
        self.torch_autocast_gradscaler = None
        self.loss_scale = self.cur_scale = 1.0

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    bit16_groups = fp16_groups = property(lambda self: [g["params"] for g in self.param_groups])

    def backward_epilogue(self, **_: Any) -> None:
        """Backward has ended, with engine.backward(loss) and with loss.backward()."""
        self.fused.finish()
        self.layout.end_backward()

    def step(self, closure: None = None) -> None:
        """Finalises a step whose updates were made in backward; a second call changes nothing."""
        if closure is not None:
            raise ValueError("engine.step() takes no closure: the update happens in backward.")
        self.optimizer._opt_called = True  # torch's schedulers look for a step, made in backward
        norm = self.fused.end_step()
        if norm is not None:
            self._global_grad_norm = norm
            self.layout.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def state_dict(self) -> dict[str, Any]:
        layout = self.layout
        return checkpoint.save(self.optimizer, layout.names, self._runs(), layout.parts)

    def load_state_dict(
        self,
        state_dict_list: list[Any] | dict[str, Any],
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
        saved: Any = state_dict_list
        if isinstance(saved, list):  # without ZeRO it is one dict for all ranks
            saved = saved[layout.rank]
        runs = self._runs()
        checkpoint.load(
            saved, self.optimizer, layout.names, runs, layout.parts, load_optimizer_states
        )
        self.layout.end_step()

    def _runs(self) -> dict[str, Tensor]:
        layout = self.layout
        return {name: layout.run(p) for p, name in layout.names.items()}

    def checkpoint_event_prologue(self) -> None:
        self.empty_partition_cache()

    def checkpoint_event_epilogue(self) -> None:
        self.layout.end_step()

    def empty_partition_cache(self) -> None:
        if isinstance(self.layout, Partitions):
            self.layout.offload.empty_partition_cache()

    def destroy(self) -> None:
        self.fused.remove()
        if isinstance(self.layout, Partitions):
            self.layout.offload.destroy()


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


def log(message: str) -> None:
    """Tells the user, once and not on every rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.info(message)
