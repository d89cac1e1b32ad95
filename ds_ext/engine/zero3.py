"""ZeRO-3: DeepSpeed keeps a run of each parameter on each rank, and gathers them when needed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups, z3_leaf_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_ext.backward.owners import Hook
from ds_ext.distributed.desync import Order
from ds_ext.distributed.layout import Agreement, Layout
from ds_ext.distributed.placement import Group, Placement, Sharded
from ds_ext.engine import copies, leftovers, quantized
from ds_ext.engine.copies import Cut
from ds_ext.engine.parameters import deepspeed_parameter

# DeepSpeed counts the uses of each module down to know when to gather and to release it.
_COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


class Partitioned(Sharded):
    """Parameters of which a rank holds its run alone, ``ds_tensor`` less the padding."""

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Returns the shape that DeepSpeed gathers a parameter in."""
        return tuple(deepspeed_parameter(param).ds_shape)

    def run(self, param: Tensor) -> Tensor:
        """Returns this rank's run of the weight, [len(shard)], to be updated in place."""
        return deepspeed_parameter(param).ds_tensor[: len(self.shard(param))]

    def publish(self, params: Iterable[Tensor]) -> None:
        """Does nothing: no other rank holds the weight, but for what ``end_step`` gathers.

        What was gathered before is another tensor, unless DeepSpeed had nothing to gather.
        """
        if self.num_shards == 1:
            Placement.publish(self, params)


class Partitions(Layout):
    """The layout of a model whose parameters DeepSpeed has partitioned.

    Args:
        offload: what partitions and gathers them.
        group: the ranks of data parallelism.
        names: of all parameters.
        placement_of: gives a parameter's placement.
        overlap: whether gradients are reduced while backward goes on.
        copy_group: see ``Layout``.
    """

    def __init__(
        self,
        offload: DeepSpeedZeRoOffload,
        group: Group,
        names: Mapping[Tensor, str],
        placement_of: Callable[[Tensor], Placement],
        overlap: bool,
        copy_group: Group = None,
    ) -> None:
        self.offload = offload
        super().__init__(group, names, placement_of, copy_group)
        # Gloo, which sums on a CPU, ends a process that is sent more than it waits for.
        ahead = overlap and self.device.type != "cpu"
        self.order = Order(offload.module, self.names, self.host_group, ahead)
        self.order.watch_first_pass(offload.get_param_coordinator())
        self.updated: set[Tensor] = set()  # in this step

    def hook(self) -> list[RemovableHandle]:
        """Looks at parameters before DeepSpeed gathers them, which overwrites data put there."""
        hook = Hook(lambda *_: self.refuse_resized() if torch.is_grad_enabled() else None)
        return [self.offload.module.register_forward_pre_hook(hook, prepend=True)]

    def may_have(self, param: Tensor, shape: torch.Size) -> bool:
        """Whether a parameter is gathered, or is partitioned and has no elements here."""
        return param.numel() == 0 or param.shape == deepspeed_parameter(param).ds_shape

    def leaves(self, module: nn.Module) -> dict[nn.Module, list[Tensor]]:
        """Returns ZeRO-3's leaf modules, whose parameters arrive together, used or not."""
        leaves = [m for m in module.modules() if z3_leaf_module(m)]
        return {leaf: list(leaf.parameters()) for leaf in leaves}

    def agree(self, waiting: Mapping[Tensor, bool], ended: bool) -> Agreement:
        """Finds that all that waits is ready: ranks have gathered the same parameters together.

        Raises:
            RuntimeError: on all ranks, where they have not.
        """
        self.bytes_sent += self.order.check_gradients(waiting, ended)
        return Agreement(list(waiting), {p for p, more in waiting.items() if more}, True)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Restores DeepSpeed's counts after a backward pass whose graph is run once more."""
        modules = [m.__dict__ for m in self.offload.module.modules()]
        counts = [{k: m[k] for k in _COUNTS if k in m} for m in modules]
        try:
            yield
        finally:
            for m, count in zip(modules, counts, strict=True):
                m.update(count)
            _release_leftovers(self.offload)

    def stored(self) -> list[Tensor]:
        """The partitions, after what is gathered was given up."""
        self.offload.empty_partition_cache()
        for param in self.params:
            deepspeed_parameter(param).ds_secondary_tensor = None
        return [deepspeed_parameter(param).ds_tensor for param in self.params]

    def publish(self, params: Iterable[Tensor]) -> None:
        """Notes which weights were updated, of which other ranks may hold gathered copies."""
        self.updated.update(params)
        super().publish(params)

    def end_backward(self) -> None:
        """Partitions what is still gathered."""
        # A module fed by no-grad inputs gets no post-backward hook: its weight is still gathered.
        _release_leftovers(self.offload)

    def discard(self) -> None:
        """Partitions what a failed backward pass has left gathered, and forgets its modules."""
        for m in self.offload.module.modules():
            m.__dict__.update({k: 0 for k in _COUNTS if k in m.__dict__})
        _release_leftovers(self.offload)
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


def _release_leftovers(offload: DeepSpeedZeRoOffload) -> None:
    """Partitions what a backward pass has left gathered; before DeepSpeed 0.19.4, all."""
    release = getattr(offload, "release_backward_leftovers", offload.partition_all_parameters)
    release()


def partition(engine: DeepSpeedEngine, cut: Cut) -> DeepSpeedZeRoOffload:
    """Partitions the engine's model; returns what gathers and prefetches its parameters.

    Args:
        engine: whose model it is.
        cut: the ranks that hold one copy of it together.

    Raises:
        ValueError: if another engine still gathers them, or for groups that do not fit.
    """
    leftovers.refuse_module_hooks(engine)
    copies.refuse_other_cut(engine.module.named_parameters(), cut)
    # What an engine before this one kept gathered, this one may not keep up to date.
    for param in engine.module.parameters():
        if hasattr(param, "ds_persist"):
            param.ds_persist = False
            param.partition()
    if engine.has_moe_layers:
        engine._validate_zero3_moe_compatibility()
        engine._resolve_zero3_param_placement()
    offload = DeepSpeedZeRoOffload(
        engine.module,
        timers=engine.timers,
        ds_config=engine.config,
        overlap_comm=engine.zero_overlap_comm(),
        prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
        max_reuse_distance=engine.zero_max_reuse_distance(),
        max_live_parameters=engine.zero_max_live_parameters(),
        param_persistence_threshold=engine.zero_param_persistence_threshold(),
        model_persistence_threshold=engine.zero_model_persistence_threshold(),
        dp_process_group=cut.shards,
        offload_param_config=engine.zero_offload_param(),
        mpu=engine.mpu,
        zero_param_parallel_group=_secondary_group(engine),
        zero_quantized_weights=engine.zero_quantized_weights(),
        zero_module_granularity_threshold=engine.zero_module_granularity_threshold(),
        log_trace_cache_warnings=engine.zero_log_trace_cache_warnings(),
    )
    quantized.spare(offload, engine.module.parameters())
    return offload


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
