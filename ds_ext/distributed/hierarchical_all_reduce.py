"""All-reduce in two levels: inside groups of consecutive ranks, such as a host, then across them.

A ring of d ranks waits for 2(d - 1) messages in sequence. Two levels of s and d / s ranks wait for
2(s - 1) + 2(d / s - 1). NCCL's trees need neither.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ds_ext.distributed import groups
from ds_ext.distributed.groups import Group, size_of
from ds_ext.distributed.rank_failure import explained


class HierarchicalAllReduce:
    """Adds up tensors over the ranks of a group.

    A reduce-scatter inside each group of ``size`` ranks gives a rank its slice of the sums. Slices
    are all-reduced across the groups, then gathered inside them. All ranks receive the same bits,
    and a rank sends 1 / size of the sums across groups.

    Args:
        group: the ranks.
        size: ranks of an inner group, a divisor of the number of ranks.
        device: of the sums.
    """

    def __init__(self, group: Group, size: int, device: torch.device) -> None:
        inside, across = groups.divided(group, size)
        self.inside = groups.with_own_queue(inside, device)
        self.across = groups.with_own_queue(across, device)

    def add_up(self, sums: Tensor) -> int:
        """Adds up partial sums in place; returns the bytes passed to collectives."""
        flat, size = sums.view(-1), size_of(self.inside)
        padded = functional.pad(flat, (0, -len(flat) % size))
        own = torch.empty_like(padded[: len(padded) // size])
        with explained():
            self.inside.reduce_scatter_tensor_coalesced([own], [padded]).wait()  # type: ignore[union-attr]
            dist.all_reduce(own, group=self.across)
            self.inside.allgather_into_tensor_coalesced([padded], [own]).wait()  # type: ignore[union-attr]
        flat.copy_(padded[: len(flat)])
        return padded.nbytes + 2 * own.nbytes


def of(group: Group, size: int, device: torch.device) -> HierarchicalAllReduce | None:
    """Returns the all-reduce of a group; None if one level is enough.

    Raises:
        ValueError: ``size`` does not divide the number of ranks.
    """
    ranks = size_of(group)
    if size < 2 or ranks <= size:
        return None
    if ranks % size:
        raise ValueError(
            f"ds_ext.sum_group_size = {size} does not divide the {ranks} ranks that add up a "
            "rule's sums: set it to a divisor, or remove it."
        )
    return HierarchicalAllReduce(group, size, device)
