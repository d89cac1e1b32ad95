"""ZeRO-3: each rank keeps a run of each parameter, and DeepSpeed gathers parameters when needed."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import groups, z3_leaf_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_ext.backward import streams
from ds_ext.backward.int8_weights import restore_bf16
from ds_ext.backward.module_hooks import Hook
from ds_ext.config.parsing import section
from ds_ext.distributed.consensus import OrderCheck
from ds_ext.distributed.groups import Group
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement, Sharded
from ds_ext.engine import int8_partitions
from ds_ext.engine.parameters import deepspeed_parameter
from ds_ext.ops.shard import Shard

# DeepSpeed counts down each module's uses to decide when to gather and release it.
_COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


class Zero3Placement(Sharded):
    """Placement of partitioned parameters. A rank holds its run: ``ds_tensor`` without padding."""

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Returns the shape of a gathered parameter."""
        return tuple(deepspeed_parameter(param).ds_shape)

    def run(self, param: Tensor, shard: Shard) -> Tensor:
        """Returns this rank's run of the weight, [len(shard)], to be updated in place."""
        partition: Tensor = deepspeed_parameter(param).ds_tensor
        return partition[: len(shard)]

    def publish(self, params: Iterable[Tensor]) -> None:
        """Sends nothing: DeepSpeed's next gather of a module reads the updated partitions.

        ``Zero3Layout.end_step`` gathers persistent parameters. On one rank DeepSpeed does not
        gather, and the run is the whole weight, so its version counter is incremented.
        """
        if self.num_shards == 1:
            Placement.publish(self, params)


class Zero3Layout(Layout):
    """The ``Layout`` of a model whose parameters DeepSpeed has partitioned.

    All ranks gather the same parameters, whose gradients are then ready: ``order`` checks it.

    Args:
        offload: DeepSpeed's object that partitions and gathers the parameters.
        group, names, placement_of: see ``Layout``.
        overlap: whether gradients are reduced while backward continues.
    """

    order: OrderCheck

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
        self.agrees_at_once = True
        # Gloo, the CPU backend, aborts a process that gets more messages than it waits for.
        ahead = overlap and self.device.type != "cpu"
        self.order = OrderCheck(offload.module, self.names, self.host_group, ahead)
        self.order.watch_first_pass(offload.get_param_coordinator())
        self.updated: set[Tensor] = set()  # weights that this step has updated

    def hook(self) -> list[RemovableHandle]:
        """Registers checks before DeepSpeed's gather, which hides resized parameters."""

        def check(*_: object) -> None:
            if torch.is_grad_enabled():
                self.refuse_resized()
            if self.has_failed:
                self.has_failed = False
                self.order.check_dropped()

        return [self.offload.module.register_forward_pre_hook(Hook(check), prepend=True)]

    def has_valid_shape(self, param: Tensor, shape: torch.Size) -> bool:
        """Returns whether a parameter is partitioned (empty) or has its gathered shape."""
        return param.numel() == 0 or param.shape == deepspeed_parameter(param).ds_shape

    def leaves(self, module: nn.Module) -> dict[nn.Module, list[Tensor]]:
        """Returns the parameters of ZeRO-3's leaf modules."""
        return {m: list(m.parameters()) for m in module.modules() if z3_leaf_module(m)}

    @contextlib.contextmanager
    def norm_prepass(self) -> Iterator[None]:
        """Context that restores DeepSpeed's counts, for a graph that will run backward again."""
        modules = [m.__dict__ for m in self.offload.module.modules()]
        counts = [{k: m[k] for k in _COUNTS if k in m} for m in modules]
        try:
            yield
        finally:
            for m, count in zip(modules, counts, strict=True):
                m.update(count)
            self.offload.release_backward_leftovers()

    def stored(self) -> list[Tensor]:
        """Releases gathered parameters, and returns the partitions."""
        self.offload.empty_partition_cache()
        for param in self.params:
            deepspeed_parameter(param).ds_secondary_tensor = None
        return [deepspeed_parameter(param).ds_tensor for param in self.params]

    def publish(self, params: Iterable[Tensor]) -> None:
        """Records updated weights, because ranks may hold outdated gathered copies."""
        self.updated.update(params)
        super().publish(params)

    def end_backward(self) -> None:
        """Partitions parameters that are still gathered."""
        # A module whose inputs need no gradient has no post-backward hook, so it stays gathered.
        self.offload.release_backward_leftovers()

    def discard(self, in_backward: bool) -> None:
        """Partitions parameters that a failed backward pass left gathered, and resets counts.

        Without such a pass, a loss may still need the parameters that its forward pass gathered.
        The next forward pass compares the ranks, not this function, which also runs while a rank
        ends by an error.
        """
        if not (in_backward or self.updated):
            return
        for m in self.offload.module.modules():
            m.__dict__.update({k: 0 for k in _COUNTS if k in m.__dict__})
        self.offload.release_backward_leftovers()
        self.end_step()

    def end_step(self) -> None:
        """Gathers persistent parameters from their updated partitions.

        Also drops hpZ's secondary copies of updated weights. The next forward pass creates new
        copies. Partition first: partitioning makes a copy, and one of old weights is stale. A
        gather takes parameters with copies or without, so persistent ones are without.
        Under ``torch_autocast``, only this gather has the dtype, and the bits, of later ones.
        """
        streams.synchronize(self.device)  # DeepSpeed's gathers wait for no other stream
        self.offload.partition_all_parameters()
        persistent = self.offload.persistent_parameters
        for param in (*self.updated, *persistent):
            deepspeed_parameter(param).ds_secondary_tensor = None
        self.updated.clear()
        if persistent:
            persistent[0].all_gather_coalesced(persistent).wait()


def partition(engine: DeepSpeedEngine) -> DeepSpeedZeRoOffload:
    """Partitions an engine's model over the data-parallel ranks, as DeepSpeed does for inference.

    Returns DeepSpeed's object that gathers its parameters.

    Raises:
        ValueError: the groups do not match those of an earlier partition.
    """
    # Partition parameters that an earlier engine kept gathered. This engine may not update them.
    for param in engine.module.parameters():
        if hasattr(param, "ds_persist"):
            param.ds_persist = False
            param.partition()
    _make_secondary_group(engine)
    offload: DeepSpeedZeRoOffload = DeepSpeedEngine._configure_zero_optimizer(engine, None)
    _hold_weakly(engine.module)
    _cache_by_engine(offload.get_param_coordinator())
    _release_frozen(offload)
    if engine.torch_autocast_enabled():
        for param in engine.module.parameters():
            _gather_exactly(deepspeed_parameter(param))
    if section(engine.config).weight_storage:
        int8_partitions.store(engine.module)
    else:
        restore_bf16(engine.module)  # which an earlier engine may have stored in 8 bits
    return offload


def _hold_weakly(module: nn.Module) -> None:
    """Replaces DeepSpeed's global reference to a partitioned model by a weak one.

    Otherwise no model, engine or optimizer would ever be freed. DeepSpeed needs the entry at the
    bottom of its stack of running modules for weights that are read outside of a forward pass.
    """
    stack = parameter_offload.FWD_MODULE_STACK

    def remove(entry: object) -> None:  # by identity: comparing uses the freed model
        stack[:] = [each for each in stack if each is not entry]

    if stack and stack[-1] is module:
        stack[-1] = weakref.proxy(module, remove)


def _cache_by_engine(coordinator: Any) -> None:
    """Gives a coordinator its own cache of the parameters to release after each module.

    DeepSpeed's cache belongs to the class: from the second step on, it would keep the coordinators
    and modules of all engines alive.
    """
    name = "_PartitionedParameterCoordinator__params_to_release"
    cached = inspect.getclosurevars(getattr(type(coordinator), name)).nonlocals["func"]
    method = MethodType(cached.__wrapped__, coordinator)
    setattr(coordinator, name, functools.lru_cache(maxsize=None)(method))


def _release_frozen(offload: DeepSpeedZeRoOffload) -> None:
    """Lets a module's backward pass release its frozen parameters, also if it was checkpointed.

    DeepSpeed keeps those that a recomputation gathers until the module around it ends its backward
    pass. With reentrant checkpointing, this is the whole model.
    """
    coordinator = offload.get_param_coordinator()
    release = coordinator.release_sub_module
    modules = {m.ds_id: m for m in offload.module.modules() if "ds_id" in m.__dict__}

    def release_sub_module(module: nn.Module, forward: bool = False) -> None:
        params = [] if forward else list(iter_params(module, recurse=z3_leaf_module(module)))
        for param in params:
            for number in param.ds_active_sub_modules - {module.ds_id}:
                around = modules.get(number)
                kept: set[Tensor] = getattr(around, "ds_recompute_parameters", set())
                # A module around it that uses the parameter itself still needs it.
                if param in kept and all(param is not own for own in iter_params(around)):
                    kept.discard(param)
                    param.ds_active_sub_modules.discard(number)
        release(module, forward=forward)

    coordinator.release_sub_module = release_sub_module


def _gather_exactly(param: Any) -> None:
    """Lets ``GatheredParameters`` of a parameter gather the weights anew, in their own dtype.

    A forward pass gathers weights in the dtype of ``torch_autocast``, and may leave them gathered.
    With a ``modifier_rank``, these rounded weights would overwrite the partitions.
    """
    gather = param.all_gather

    def all_gather(param_list: list[Any] | None = None, **how: Any) -> Any:
        available = [p for p in param_list or () if p.ds_status is ZeroParamStatus.AVAILABLE]
        if available:  # ``GatheredParameters`` always passes a list
            param.partition(available)
        return gather(param_list, **how)

    param.all_gather = all_gather


def _make_secondary_group(engine: DeepSpeedEngine) -> None:
    """Makes the group that shares a secondary copy of the weights (ZeRO++ hpZ), usually a host's.

    Raises ValueError if DeepSpeed does not support it with this engine, or beside earlier ones.
    """
    world = dist.get_world_size()
    size = engine.zero_hpz_partition_size()
    if size > 1 and dist.get_world_size(engine.seq_data_parallel_group) != world:
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size = {size}: DeepSpeed's hpZ groups ignore "
            "model parallelism: remove one of them."
        )
    if groups._get_zero_param_intra_parallel_group() is None:
        if size > 1:
            groups._create_zero_param_parallel_group(size)
        return
    there = groups._get_zero_param_intra_parallel_group_world_size()
    if there != min(size, world):
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size = {size}, but another engine of this "
            f"process has {there}: DeepSpeed supports only one value per process."
        )
