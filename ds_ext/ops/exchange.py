"""Exchanges: the ranks send their runs of a matrix to the rank that steps it, and get runs back.

A rule that needs the whole matrix in one place, such as Muon, yields an ``Exchange`` instead of
partial sums, by ``yield from`` a function of this file. Whoever advances the generators of a bucket
sends the elements of all its exchanges in one all-to-all.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_ext.ops.expressions import Sums
from ds_ext.ops.shard import Shard


class Exchange(tuple[Tensor, ...]):
    """A flat tensor that a generator yields, to receive elements of the same matrix.

    Args:
        x: the rank's run, [len(shard)]; or the whole matrix on the rank with the turn, and nothing
            on others.
        shard: the position of the run.
        collects: whether runs are sent to the rank with the turn, or that rank sends the runs.
    """

    shard: Shard
    collects: bool

    def __new__(cls, x: Tensor, shard: Shard, collects: bool) -> "Exchange":
        """Keeps the position beside the tensor."""
        made = super().__new__(cls, (x,))
        made.shard, made.collects = shard, collects
        return made

    def sent(self, rank: int) -> Tensor:
        """Returns what this rank sends to ``rank``, flat."""
        (x,) = self
        if self.collects:
            return x if rank == self.shard.owner else x[:0]
        return x[slice(*self.shard.run_of(rank))] if self.shard.has_turn else x[:0]

    def received(self, rank: int) -> int:
        """Returns how many elements ``rank`` sends to this rank."""
        if not self.collects:
            return len(self.shard) if rank == self.shard.owner else 0
        start, stop = self.shard.run_of(rank)
        return stop - start if self.shard.has_turn else 0

    def result(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the elements that the ranks have sent, in their order in the matrix."""
        if not self.collects:
            return parts[self.shard.owner]
        if not self.shard.has_turn:
            return self[0][:0]
        return torch.cat([parts[rank] for rank in self.shard.ranks_with_runs])


class Exchanges:
    """The exchanges of a round, whose elements are sent together."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges
        self.results: list[Tensor] = []

    def packed(self, ranks: int) -> tuple[Tensor, list[int], list[int]]:
        """Returns what this rank sends, flat, and how many elements each rank sends and gets.

        Returns:
            The elements, those for rank 0 first; by rank, the number of elements that this rank
            sends to it; and the number that it sends to this rank.
        """
        sent = [[x.sent(rank) for x in self.exchanges] for rank in range(ranks)]
        sizes = [sum(x.numel() for x in to_rank) for to_rank in sent]
        received = [sum(x.received(rank) for x in self.exchanges) for rank in range(ranks)]
        return torch.cat([x for to_rank in sent for x in to_rank]), sizes, received

    def deliver(self, parts: Sequence[Tensor]) -> None:
        """Sets ``results`` from what each rank has sent, a flat tensor by rank."""
        split = [
            part.split([x.received(rank) for x in self.exchanges])
            for rank, part in enumerate(parts)
        ]
        for x, own in zip(self.exchanges, zip(*split, strict=True), strict=True):
            self.results.append(x.result(own).to(x[0].dtype))


def collect(x: Tensor, shard: Shard) -> Generator[Sums, Sums, Tensor | None]:
    """Returns the whole matrix, [rows, cols], on the rank with the turn; None on the others.

    ``x`` is this rank's run, [len(shard)].
    """
    if shard.is_cut:
        (x,) = yield Exchange(x, shard, collects=True)
    if not shard.has_turn:
        return None
    if shard.split is None:
        return x.view(shard.rows, shard.cols)
    whole = x.new_empty(shard.rows, shard.cols)
    for b in _whole(shard).blocks():
        whole[b.rows, b.cols] = x[b.run].view(b.shape[1:])
    return whole


def distribute(whole: Tensor | None, shard: Shard, like: Tensor) -> Generator[Sums, Sums, Tensor]:
    """Returns this rank's run, [len(shard)], of a matrix that ``collect`` has returned.

    Args:
        whole: the matrix on the rank with the turn, None on the others.
        shard: the position of the run.
        like: a tensor of its dtype and device.
    """
    x = like.new_empty(0) if whole is None else whole.reshape(-1)
    if whole is not None and shard.split is not None:
        x = torch.cat([whole[b.rows, b.cols].reshape(-1) for b in _whole(shard).blocks()])
    if shard.is_cut:
        (x,) = yield Exchange(x, shard, collects=False)
    return x


def _whole(shard: Shard) -> Shard:
    """All elements, in the order of the run's own."""
    return replace(shard, start=0, stop=shard.numel)
