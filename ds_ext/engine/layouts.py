"""Where each parameter of an engine lies: by ZeRO stage, tensor parallelism and experts.

| parameters                  | stage 0         | stages 1, 2     | stage 3                |
|-----------------------------|-----------------|-----------------|------------------------|
| all but the following       | Replicated(d)   | Sharded(d)      | Partitioned(d)         |
| experts spread over ranks   | Replicated(e)   | Sharded(e)      | Partitioned(e)         |
| split by tensor parallelism | Replicated(d)*t | Sharded(d)*all  | Partitioned(d)*all     |
| left whole by it            | Replicated(all) | Sharded(all)    | Partitioned(d, t)      |
| with ``ds_ext.shard_size``  | refused         | Sharded(s, c)   | Partitioned(s, c)      |
| gradients in 4 bits         | refused         | refused         | InFourBits(d)          |

Gradients are summed over the groups in brackets: d are the ranks of data parallelism (those of a
sequence too), e those of them that have the same experts, t those of tensor parallelism, s those
that hold one copy together and c those that hold the same part of each copy. A rule's partial sums
are added up over the group after the asterisk, else over the first one in brackets, but at stage 0
over none. A second group in brackets is of copies, which are updated alike.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import Tensor

from ds_ext.config import gradients
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Group, Placement, Replicated, Sharded, everyone, size_of
from ds_ext.engine import copies, expert_parallel, hosts, pipeline, quantized_gradients, zero3
from ds_ext.engine.zero3 import Partitioned, Partitions

Kind: TypeAlias = type[Replicated] | type[Sharded]
PlacementOf: TypeAlias = Callable[[Tensor], Placement]

_CUT: dict[int, type[Sharded]] = {1: Sharded, 2: Sharded, 3: Partitioned}
_BY_STAGE: dict[int, Kind] = {0: Replicated, **_CUT}


def layout_of(engine: DeepSpeedEngine) -> Layout:
    """Returns the layout of an engine's parameters, which it partitions at stage 3.

    Raises:
        ValueError: for a model or ways of parallelism for which there is none.
    """
    if pipeline.is_pipeline(engine):
        kind = _BY_STAGE[int(engine.zero_optimization_stage())]
        layout: Layout = pipeline.layout_of(engine, kind)
    else:
        layout = _of_whole_model(engine)
    layout.add_up_in_groups(_sum_group_size(engine))
    return layout


def _of_whole_model(engine: DeepSpeedEngine) -> Layout:
    """The layout of a model of which every rank has all layers."""
    names = expert_parallel.names(engine.param_names, engine.module)
    group, stage = engine.seq_data_parallel_group, int(engine.zero_optimization_stage())
    cut = copies.cut(group, copies.shard_size(engine.config))
    offload = zero3.partition(engine, cut) if stage == 3 else None
    kind, losses = _BY_STAGE[stage], _num_losses(engine)
    tensor_group = groups.get_tensor_model_parallel_group() if engine.autotp_size() > 1 else None
    if tensor_group is not None:
        dense = _with_tensor_parallelism(kind, group, tensor_group, losses, names)
    elif cut.copies is not None:
        dense = _alike(_CUT[stage](cut.shards, losses, copies=cut.copies))
    elif engine.zero_quantized_gradients():
        dense = quantized_gradients.placements(group, losses, names)
    else:
        dense = _alike(kind(group, losses))
    placement_of = _with_experts(dense, kind, group, losses, size_of(tensor_group))
    if offload is None:
        return Layout(group, names, placement_of, cut.shards)
    overlap = bool(engine.zero_overlap_comm())
    return Partitions(offload, group, names, placement_of, overlap, cut.shards)


def _sum_group_size(engine: DeepSpeedEngine) -> int:
    """Ranks that add up a rule's sums before they are added up across such groups; 0: all."""
    size = gradients.section_of(engine.config).sum_group_size
    return hosts.num_ranks("ds_ext.sum_group_size", "host") if size == "host" else size


def _alike(placement: Placement) -> PlacementOf:
    """The first row of the table, or the last."""
    return lambda param: placement


def _with_experts(
    dense: PlacementOf, kind: Kind, group: Group, losses: int, tensor_size: int
) -> PlacementOf:
    """The second row, beside what ``dense`` gives the other parameters."""

    @functools.cache
    def experts(own: Group, grad_divisor: int) -> Placement:
        return kind(own, grad_divisor)

    def placement_of(param: Tensor) -> Placement:
        own = expert_parallel.group(param) if expert_parallel.is_expert(param) else group
        if own is group or (tensor_size == 1 and size_of(own) == size_of(group)):
            return dense(param)
        # Tokens of all ranks have come to these experts: their gradients are of all losses.
        return experts(own, losses * expert_parallel.gradient_factor(param, tensor_size))

    return placement_of


def _with_tensor_parallelism(
    kind: Kind, group: Group, tensor_group: Group, losses: int, names: Mapping[Tensor, str]
) -> PlacementOf:
    """The next two rows: what is left whole is the same on all ranks of tensor parallelism."""
    from ds_ext.engine import autotp_shards  # needs DeepSpeed 0.19.8, as tensor parallelism does

    is_replicated = kind is Replicated
    shards = autotp_shards.tensor_parallel_shards(
        names, dist.get_rank(tensor_group), 1 if is_replicated else size_of(group)
    )
    split = kind(
        group,
        losses,
        statistics_group=tensor_group if is_replicated else everyone(),
        tensor_parallel_shards=shards,
    )
    # Gradients are averaged over these copies too, for else what differs (dropout, or a sum in
    # another order) would lead them apart.
    divisor = losses * size_of(tensor_group)
    if kind is Partitioned:
        whole: Placement = Partitioned(group, divisor, copies=tensor_group)
    else:
        whole = kind(everyone(), divisor)
    return lambda param: split if param in shards else whole


def _num_losses(engine: DeepSpeedEngine) -> int:
    """How many mean losses a gradient is summed over: a sequence's ranks have parts of one.

    Raises ValueError if DeepSpeed does not sum over these ranks.
    """
    size, group = int(engine.sequence_parallel_size), engine.seq_data_parallel_group
    if size > 1:
        sequence = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        if not set(sequence) <= set(dist.get_process_group_ranks(group)):
            raise ValueError(
                "the mpu's get_sequence_data_parallel_group() lacks ranks of its "
                "get_sequence_parallel_group(), whose gradients DeepSpeed would not add up: give "
                "one that has them, or leave out mpu and write "
                f'"sequence_parallel_size": {size} into the config.'
            )
    return size_of(group) // size
