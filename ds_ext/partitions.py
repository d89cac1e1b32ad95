"""Where runs lie by ZeRO stage; ZeRO-3's are DeepSpeed's own partitions of parameters."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from deepspeed import comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups, z3_leaf_module
from torch import Tensor, nn

from ds_ext.layout import Agreement, Group, Replicated, Sharded
from ds_ext.order import Order
from ds_ext.shard import Shard


class Partitions(Sharded):
    """ZeRO-3's layout: a rank holds its run alone, ``ds_tensor`` less the padding."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.offload = _partition(engine)
        super().__init__(engine.seq_data_parallel_group, engine.param_names)
        # Gloo, which sums on a CPU, ends a process that is sent more than it waits for.
        ahead = bool(engine.zero_overlap_comm()) and self.device.type != "cpu"
        self.order = Order(engine.module, self.names, self.host_group, ahead)
        self.order.watch_first_pass(self.offload.get_param_coordinator())
        self.updated: set[Tensor] = set()  # in this step

    def shard(self, param: Tensor) -> Shard:
        return Shard.of_rank(tuple(param.ds_shape), self.rank, self.world)

    def run(self, param: Tensor) -> Tensor:
        return param.ds_tensor[: len(self.shard(param))]

    def leaves(self, module: nn.Module) -> dict[nn.Module, list[Tensor]]:
        leaves = [m for m in module.modules() if z3_leaf_module(m)]
        return {leaf: list(leaf.parameters()) for leaf in leaves}

    def agree(self, waiting: Mapping[Tensor, bool], ended: bool) -> Agreement:
        """The ranks have gathered the same parameters together: what waits on one does on all.

        Where they have not, RuntimeError on all of them.
        """
        self.bytes_sent += self.order.check_gradients(waiting, ended)
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
        """Nobody else holds the weight, but for what ``end_step`` brings up to date."""
        self.updated.update(params)

    def end_backward(self) -> None:
        # A module fed by no-grad inputs gets no post-backward hook: its weight is still gathered.
        self.offload.release_backward_leftovers()

    def end_step(self) -> None:
        """Brings the parameters that ZeRO-3 keeps gathered up to date with their partitions.

        And forgets hpZ's second copies of what was updated: the next forward pass makes new ones.
        Not before all is partitioned, which would make them of what is still gathered and old.
        """
        self.offload.partition_all_parameters()
        for param in self.updated:
            param.ds_secondary_tensor = None
        self.updated.clear()
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


def _secondary_group(engine: DeepSpeedEngine) -> Group:
    """The ranks that hold a second copy of the weights together: ZeRO++ hpZ, usually a host's."""
    world = dist.get_world_size()
    size = engine.zero_hpz_partition_size()
    if size <= 1:
        return None
    if dist.get_world_size(engine.seq_data_parallel_group) != world:
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size = {size}: DeepSpeed would cut its groups "
            "without regard to model parallelism: remove one of them."
        )
    if world % min(size, world):
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size = {size} does not divide the {world} ranks."
        )
    if groups._get_zero_param_intra_parallel_group() is None:
        groups._create_zero_param_parallel_group(size)
    there = groups._get_zero_param_intra_parallel_group_world_size()
    if there != min(size, world):
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size = {size}, where another engine of this "
            f"process has {there}: DeepSpeed takes one for all."
        )
    return groups._get_zero_param_intra_parallel_group()


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
        zero_param_parallel_group=_secondary_group(engine),
        zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
        log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
    )
