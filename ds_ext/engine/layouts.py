"""Chooses each parameter's placement by ZeRO stage, tensor parallelism and experts.

| parameters                     | stage 0         | stages 1, 2   | stage 3              | sums   |
|--------------------------------|-----------------|---------------|----------------------|--------|
| by default                     | Replicated(d)   | Sharded(d)    | Zero3Placement(d)    | d      |
| experts spread over ranks      | Replicated(e)   | Sharded(e)    | Zero3Placement(e)    | e      |
| split by tensor parallelism    | Replicated(d)   | Sharded(d)    | Zero3Placement(d)    | all    |
| unsplit by tensor parallelism  | Replicated(all) | Sharded(all)  | Zero3Placement(d, t) | all, d |

Gradients are summed over the groups in parentheses. The ranks of a second group hold replicas,
which compute the same update. A rule's partial sums are reduced over the last column's group (the
second one at stage 3). At stage 0 only split parameters need a reduction, over t.

d: the data-parallel ranks, including ranks that share a sequence.
e: the data-parallel ranks that have the same experts.
t: the tensor-parallel ranks.
"""

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import Tensor

from ds_ext.distributed.groups import Group, everyone, made, size_of
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement, Replicated, Sharded
from ds_ext.engine import autotp, expert_parallel, pipeline, zero3
from ds_ext.engine.parameters import deepspeed_parameter
from ds_ext.engine.zero3 import Zero3Layout, Zero3Placement

PlacementType: TypeAlias = type[Replicated] | type[Sharded]

_BY_STAGE: dict[int, PlacementType] = {0: Replicated, 1: Sharded, 2: Sharded, 3: Zero3Placement}


def layout_of(engine: DeepSpeedEngine) -> Layout:
    """Returns the layout of an engine's parameters. At stage 3, partitions the parameters.

    Raises:
        ValueError: the model or the combination of parallelism is not supported.
    """
    group, stage = engine.seq_data_parallel_group, int(engine.zero_optimization_stage())
    kind = _BY_STAGE[stage]
    if pipeline.is_pipeline(engine):
        return pipeline.layout_of(engine, kind)
    names = expert_parallel.global_names(engine.param_names, engine.module)
    offload = zero3.partition(engine) if stage == 3 else None
    losses = _num_mean_losses(engine)
    tensor_group = groups.get_tensor_model_parallel_group() if engine.autotp_size() > 1 else None
    split, tensor_size = dict[Tensor, Placement](), size_of(tensor_group)
    if tensor_group is None:
        whole: Placement = kind(group, losses)
    else:
        split, whole = _tensor_parallel(kind, group, tensor_group, losses, names)
    experts = functools.cache(kind)

    def placement_of(param: Tensor) -> Placement:
        own = group
        if expert_parallel.is_expert(param):
            own = groups._get_expert_data_parallel_group(deepspeed_parameter(param).group_name)
        if own is group or (tensor_size == 1 and size_of(own) == size_of(group)):
            return split.get(param, whole)
        # These experts get tokens from all ranks, so their gradients come from all losses. Tensor-
        # parallel ranks have the same tokens. Each sends a part of them to the experts, and all
        # gather the outputs, whose gradients are equal: AutoEP sums these over the ranks, and
        # deepspeed.moe takes them from one rank.
        is_autoep = expert_parallel.stack_position(param) is not None
        return experts(own, losses * (tensor_size if is_autoep else 1))

    if offload is None:
        return Layout(group, names, placement_of)
    return Zero3Layout(offload, group, names, placement_of, bool(engine.zero_overlap_comm()))


def share_time_limit(engine: DeepSpeedEngine) -> None:
    """Sets the timeout of an engine's process groups, and ours, to that of the default group.

    DeepSpeed creates its groups with torch's default timeout, half an hour for gloo.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    distributed: Any = dist  # torch 2.15 adds set_timeout, and warns about the older name
    set_timeout = getattr(distributed, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    found = {*made(), engine.seq_data_parallel_group}
    found |= {groups._TENSOR_MODEL_PARALLEL_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP}
    found.update(groups._get_expert_parallel_group_dict().values())  # they exchange tokens
    found.update(groups._get_expert_data_parallel_group_dict().values())
    if engine.sequence_parallel_size > 1:
        found.add(groups._get_sequence_parallel_group())
    if pipeline.is_pipeline(engine):
        found.update(tied["group"] for tied in engine.module.tied_comms.values())
    for group in found - {None}:
        set_timeout(everyone._get_backend(engine.device).options._timeout, group)


def _tensor_parallel(
    kind: PlacementType, group: Group, tensor_group: Group, losses: int, names: Mapping[Tensor, str]
) -> tuple[dict[Tensor, Placement], Placement]:
    """The placements of split parameters, and of unsplit ones, which all ranks have alike."""
    is_replicated = kind is Replicated
    rank, num_runs, order = dist.get_rank(tensor_group), 1, None
    if not is_replicated:  # the ranks form a grid
        num_runs, across = size_of(group), dist.get_process_group_ranks(tensor_group)
        along = [x - dist.get_rank() for x in dist.get_process_group_ranks(group)]
        order = tuple(x + shift for x in across for shift in along)
    shards = autotp.tensor_parallel_shards(names, rank, num_runs, order)
    split = kind(
        group,
        losses,
        statistics_group=tensor_group if is_replicated else everyone(),
        tensor_parallel_shards=shards,
    )
    # Also average gradients of unsplit parameters over their replicas. Otherwise dropout or the
    # order of summation would make the replicas differ.
    divisor = losses * size_of(tensor_group)
    if kind is Zero3Placement:
        whole: Placement = Zero3Placement(group, divisor, replicas=tensor_group)
    else:
        whole = kind(everyone(), divisor)
    return dict.fromkeys(shards, split), whole


def _num_mean_losses(engine: DeepSpeedEngine) -> int:
    """The number of mean losses in a summed gradient. Ranks that share a sequence share a loss.

    Raises ValueError if DeepSpeed does not sum gradients over the ranks of a sequence.
    """
    size, group = int(engine.sequence_parallel_size), engine.seq_data_parallel_group
    if size > 1:
        sequence = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        if not set(sequence) <= set(dist.get_process_group_ranks(group)):
            raise ValueError(
                "DeepSpeed would not sum the gradients of the ranks that share a sequence: remove "
                "data_parallel_size and mesh_param, and pass an mpu whose "
                "get_sequence_data_parallel_group() contains them, such as "
                "deepspeed.runtime.sequence_parallel.parallel_state_sp."
            )
    return size_of(group) // size
