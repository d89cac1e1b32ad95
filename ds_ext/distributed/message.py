"""Gradients that are summed as one tensor, and the votes on them."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ds_ext.distributed.placement import Placement


class Message(NamedTuple):
    """Gradients in one tensor, whose row i holds the runs of rank i."""

    placement: Placement  # of all its parameters
    memory: Tensor  # [ranks, width], contiguous
    columns: Mapping[Tensor, slice]  # of each parameter
    spare: int = 0  # the number of last columns, for votes

    def grad(self, param: Tensor) -> Tensor:
        """Returns a rank's gradient of a parameter before the sum, [ranks, width of its runs]."""
        return self.memory[:, self.columns[param]]

    def takes_votes(self, votes: Tensor) -> bool:
        """Writes votes [n] to the spare columns of all rows; returns whether there are enough."""
        has_room = len(votes) <= self.spare
        if has_room:
            self.votes(self.memory, len(votes)).copy_(votes)
        return has_room

    def votes(self, memory: Tensor, count: int) -> Tensor:
        """Returns the first ``count`` spare columns of rows or of one row, [..., count]."""
        first = self.memory.shape[1] - self.spare
        return memory[..., first : first + count]


def of_votes(votes: Tensor, placement: Placement) -> Message:
    """Returns a message of only votes, [n]."""
    return Message(placement, votes.repeat(placement.num_shards, 1), {}, len(votes))
