"""Where runs lie by ZeRO stage; ZeRO-3's are DeepSpeed's own partitions of parameters."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn

from ds_ext.layout import Agreement, Replicated, Sharded
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

    def leaves(self, module: nn.Module) -> dict[nn.Module, list[Tensor]]:
        leaves = [m for m in module.modules() if z3_leaf_module(m)]
        return {leaf: list(leaf.parameters()) for leaf in leaves}

    def agree(self, waiting: Mapping[Tensor, bool], ended: bool) -> Agreement:
        """The ranks have gathered the same parameters together: what waits on one does on all."""
        return Agreement(list(waiting), {p for p, more in waiting.items() if more}, True)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        # DeepSpeed counts the uses of each module down to know when to gather and to release it.
        keys = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
        modules = [m.__dict__ for m in self.offload.module.modules()]
        counts = [{k: m[k] for k in keys if k in m} for m in modules]
        yield
        for m, count in zip(modules, counts, strict=True):
            m.update(count)
        self.offload.release_backward_leftovers()

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
        offload_param_config=engine.zero_offload_param(),
        mpu=engine.mpu,
        zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
        log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
    )
