"""Where runs lie in an engine: by ZeRO stage, whose third keeps DeepSpeed's own partitions, and by
tensor parallelism.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups, z3_leaf_module
from torch import Tensor, nn

from ds_ext.distributed.desync import Order
from ds_ext.distributed.layout import Agreement, Layout
from ds_ext.distributed.lost import explained
from ds_ext.distributed.placement import (
    Group,
    Placement,
    Replicated,
    Sharded,
    TensorParallelShard,
    by_dtype,
    everyone,
    size_of,
)
from ds_ext.engine import autotp, expert_parallel, leftovers
from ds_ext.engine.parameters import deepspeed_parameter

# DeepSpeed counts the uses of each module down to know when to gather and to release it.
_COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


class Partitioned(Sharded):
    """Parameters of which a rank holds its run alone, ``ds_tensor`` less the padding: ZeRO-3.

    Gradients of what all ranks of tensor parallelism hold alike are summed over
    ``tensor_parallel_group`` too.
    """

    tensor_parallel_group: Group = None

    def shape(self, param: Tensor) -> tuple[int, ...]:
        return tuple(deepspeed_parameter(param).ds_shape)

    def run(self, param: Tensor) -> Tensor:
        return deepspeed_parameter(param).ds_tensor[: len(self.shard(param))]

    def reduce(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        runs, wait = super().reduce(flats)
        if self.tensor_parallel_group is None:
            return runs, wait

        def wait_for_both() -> None:
            wait()
            self.bytes_sent += sum(run.nbytes for run in runs)
            with explained():
                for alike in by_dtype(runs):
                    self.tensor_parallel_group.allreduce_coalesced(alike).wait()  # type: ignore[union-attr]

        return runs, wait_for_both

    def publish(self, params: Iterable[Tensor]) -> None:
        """Nobody else holds the weight, but for what ``Partitions.end_step`` gathers.

        What was gathered before is another tensor, unless DeepSpeed had nothing to gather.
        """
        if self.num_shards == 1:
            Placement.publish(self, params)


class Partitions(Layout):
    """The layout of a model whose parameters DeepSpeed has partitioned."""

    def __init__(
        self,
        offload: DeepSpeedZeRoOffload,
        group: Group,
        names: Mapping[Tensor, str],
        placement_of: Callable[[Tensor], Placement],
        overlap: bool,
    ) -> None:
        self.offload = offload
        super().__init__(group, names, placement_of)
        # Gloo, which sums on a CPU, ends a process that is sent more than it waits for.
        ahead = overlap and self.device.type != "cpu"
        self.order = Order(offload.module, self.names, self.host_group, ahead)
        self.order.watch_first_pass(offload.get_param_coordinator())
        self.updated: set[Tensor] = set()  # in this step

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
        modules = [m.__dict__ for m in self.offload.module.modules()]
        counts = [{k: m[k] for k in _COUNTS if k in m} for m in modules]
        yield
        for m, count in zip(modules, counts, strict=True):
            m.update(count)
        self.offload.release_backward_leftovers()

    def publish(self, params: Iterable[Tensor]) -> None:
        """Nobody else holds the weight, but for what ``end_step`` brings up to date."""
        self.updated.update(params)
        super().publish(params)

    def end_backward(self) -> None:
        # A module fed by no-grad inputs gets no post-backward hook: its weight is still gathered.
        self.offload.release_backward_leftovers()

    def discard(self) -> None:
        """Partitions what a failed backward pass has left gathered, and forgets its modules."""
        for m in self.offload.module.modules():
            m.__dict__.update({k: 0 for k in _COUNTS if k in m.__dict__})
        self.offload.release_backward_leftovers()
        self.end_step()

    def end_step(self) -> None:
        """Brings the parameters that ZeRO-3 keeps gathered up to date with their partitions.

        And forgets hpZ's second copies of what was updated: the next forward pass makes new ones.
        Not before all is partitioned, which would make them of what is still gathered and old.
        """
        self.offload.partition_all_parameters()
        for param in self.updated:
            deepspeed_parameter(param).ds_secondary_tensor = None
        self.updated.clear()
        persistent = self.offload.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def layout_of(engine: DeepSpeedEngine) -> Layout:
    """The layout of the engine's ZeRO stage and its tensor or expert parallelism."""
    names, group = (
        expert_parallel.names(engine.param_names, engine.module),
        engine.seq_data_parallel_group,
    )
    offload = _partition(engine) if engine.zero_optimization_stage() == 3 else None
    kind = {0: Replicated, 3: Partitioned}.get(engine.zero_optimization_stage(), Sharded)
    if engine.autotp_size() > 1:
        tensor_group = groups.get_tensor_model_parallel_group()
        ranks = 1 if kind is Replicated else size_of(group)
        shards = autotp.tensor_parallel_shards(names, dist.get_rank(tensor_group), ranks)
        split, whole = _tensor_parallel_placements(kind, group, tensor_group, shards)
    else:
        replicas = _num_replicas(kind, group)
        shards, split, whole = {}, None, kind(group, _grad_divisor(engine), num_replicas=replicas)
    experts: dict[Group, Placement] = {}

    def placement_of(param: Tensor) -> Placement:
        if expert_parallel.is_expert(param) and size_of(
            own := expert_parallel.group(param)
        ) < size_of(group):
            # Tokens of all ranks have come to these experts: their gradients are of all losses.
            made = kind(own, grad_divisor=size_of(group), num_replicas=_num_replicas(kind, own))
            return experts.setdefault(own, made)
        return split if split is not None and param in shards else whole

    if offload is None:
        return Layout(group, names, placement_of)
    return Partitions(offload, group, names, placement_of, bool(engine.zero_overlap_comm()))


def _num_replicas(kind: type[Placement], group: Group) -> int:
    """How many ranks have the same run."""
    return size_of(group) if kind is Replicated else 1


def _grad_divisor(engine: DeepSpeedEngine) -> int:
    """How many mean losses a gradient is summed over: a sequence's ranks have parts of one.

    Raises ValueError if DeepSpeed does not sum over these ranks.
    """
    size, group = engine.sequence_parallel_size, engine.seq_data_parallel_group
    if size > 1:
        sequence = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        if not set(sequence) <= set(dist.get_process_group_ranks(group)):
            raise ValueError(
                f"sequence_parallel_size = {size}: from the config alone DeepSpeed does not add up "
                "the gradients of a sequence's ranks. Call initialize_sequence_parallel of "
                "deepspeed.runtime.sequence_parallel.parallel_state_sp, and give that module to "
                "deepspeed.initialize as mpu."
            )
    return size_of(group) // int(size)


def _tensor_parallel_placements(
    kind: type[Placement],
    group: Group,
    tensor_group: Group,
    shards: Mapping[Tensor, TensorParallelShard],
) -> tuple[Placement, Placement]:
    """Where parameters lie that tensor parallelism has split, and those that it has not.

    The latter are the same on all ranks of tensor parallelism, and so should their gradients be;
    they are averaged over these too, for else what differs (dropout, or a sum in another order)
    would lead the ranks apart.
    """
    tensor_ranks = size_of(tensor_group)
    grad_divisor = size_of(group) * tensor_ranks
    if kind is Replicated:
        split: Placement = kind(
            group,
            statistics_group=tensor_group,
            tensor_parallel_shards=shards,
            num_replicas=size_of(group),
        )
        return split, kind(everyone(), num_replicas=grad_divisor)
    split = kind(group, statistics_group=everyone(), tensor_parallel_shards=shards)
    if kind is Sharded:
        return split, kind(everyone())
    whole = Partitioned(group, grad_divisor, num_replicas=tensor_ranks)
    whole.tensor_parallel_group = tensor_group
    return split, whole


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
    return cast(Group, groups._get_zero_param_intra_parallel_group())


def _partition(engine: DeepSpeedEngine) -> DeepSpeedZeRoOffload:
    """DeepSpeed's own partitioning, gathering and prefetching of ZeRO-3 parameters."""
    leftovers.refuse_module_hooks(engine)
    # What an engine before this one kept gathered, this one may not keep up to date.
    for param in engine.module.parameters():
        if hasattr(param, "ds_persist"):
            param.ds_persist = False
            param.partition()
    if engine.has_moe_layers:
        engine._validate_zero3_moe_compatibility()
        engine._resolve_zero3_param_placement()
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
        zero_param_parallel_group=_secondary_group(engine),
        zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
        log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
    )
