"""Collectives of torch's process groups: what they are called, their kinds, what a rank sends."""

from typing import NamedTuple

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
# The methods of torch's ProcessGroup, under all the names that versions of torch give them.
METHODS = {
    "allreduce": ALL_REDUCE,
    "allreduce_coalesced": ALL_REDUCE,
    "_reduce_scatter_base": REDUCE_SCATTER,
    "reduce_scatter": REDUCE_SCATTER,
    "reduce_scatter_single": REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "_allgather_base": ALL_GATHER,
    "allgather": ALL_GATHER,
    "allgather_coalesced": ALL_GATHER,
    "allgather_into_tensor_coalesced": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "all_gather_single_coalesced": ALL_GATHER,
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
}


class Call(NamedTuple):
    """One collective of one rank."""

    caller: str  # the package that made it
    kind: str  # all-reduce, …
    nbytes: int  # of the whole that is summed or gathered


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends for a collective of ``nbytes`` in all, by a ring."""
    return (2 if kind == ALL_REDUCE else 1) * nbytes * (ranks - 1) / ranks
