"""The layout of a pipeline stage, whose ranks hold some of the model's layers.

The ranks of a stage are data-parallel: they add up its gradients and the sums of its rules. The
gradient norm and the check for bad gradients cover all stages. A tied weight is on several stages:
each stage sums its gradient over its own ranks, then ``PipelineLayout.tied`` sums it over the
stages, and every stage makes the same step.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed.groups import Group
from ds_ext.distributed.layout import Layout, ParamInfo
from ds_ext.distributed.placement import Placement, broadcast


class Tie(NamedTuple):
    """Parameters that several stages have."""

    group: dist.ProcessGroup  # this rank, and the one of each other stage with the same runs
    params: list[Tensor]  # in the same order on all of them


class PipelineLayout(Layout):
    """The layout of this rank's stage.

    Args:
        group: the ranks of the stage.
        names: of its parameters, by names that no other parameter of the model has.
        placement_of: returns a parameter's placement, whose ``num_replicas`` counts all ranks that
            update the same run, in all stages.
        weights: the parameters of all stages, in the same order on all ranks.
        ties: in the same order on all ranks that share them.
        device: of the stage, which may have no parameter.
    """

    is_pipeline_stage = True

    def __init__(
        self,
        group: Group,
        names: Mapping[Tensor, str],
        placement_of: Callable[[Tensor], Placement],
        weights: Iterable[ParamInfo],
        ties: Sequence[Tie],
        device: torch.device,
    ) -> None:
        super().__init__(group, names, placement_of, device=device)
        self.is_uniform = False  # other stages have other placements
        self.num_replicas = {placement: placement.num_replicas for placement in self.placements}
        self.voters = group  # the ranks of this stage
        self.weights = list(weights)
        index = {weight.name: i for i, weight in enumerate(self.weights)}
        self.index_of = {p: index[name] for p, name in names.items()}
        self.ties = ties
        self.tied_params = frozenset(p for tie in ties for p in tie.params)
        firsts = [dist.get_rank(tie.group) == 0 for tie in ties]
        self.saved_elsewhere = frozenset(
            p for tie, first in zip(ties, firsts, strict=True) for p in tie.params if not first
        )
        self.is_first = dist.get_rank() == 0
        for tie in ties:
            source = dist.get_global_rank(tie.group, 0)
            for param in tie.params:
                broadcast(param.detach(), source, tie.group)

    def tied(self, kept: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Adds up kept gradients of tied weights over their stages; some stages may have none.

        Args:
            kept: runs of gradients, each summed over the ranks of this stage.

        Returns:
            The summed runs that any stage has, in fp32 (fp64 of fp64 weights).
        """
        found = {}
        for group, params in self.ties:
            there = torch.tensor([p in kept for p in params], dtype=torch.int32, device=self.device)
            has = self._all_reduce(there, group).tolist()
            for param in itertools.compress(params, has):
                placement, dtype = self.placement_of[param], ops.accumulator(param.dtype)
                own = kept.get(param)
                if own is None:
                    size = placement.padded_numel(param) // placement.num_shards
                    own = torch.zeros(size, dtype=dtype, device=self.device)
                found[param] = self._all_reduce(own.to(dtype), group)
        return found

    def in_step(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns parameters with kept gradients, with tied ones in their own buckets.

        The order of a rule's sums depends on the other parameters of the bucket, which have to be
        the same on all stages that step a weight.
        """
        given, tied = {*params}, self.tied_params
        alone = [[p for p in tie.params if p in given] for tie in self.ties]
        return [[p for p in params if p not in tied], *alone]
