"""The adapter to DeepSpeed's engine: its protocol for a ZeRO optimizer, on ZeRO-3's partitions."""

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor

from ds_ext import checkpoint, settings
from ds_ext.gradients import FusedBackward, logger
from ds_ext.optimizer import RuleOptimizer
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


def log(message: str) -> None:
    """Tells the user, once and not on every rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.info(message)
