"""Records collectives of torch's process groups, and computes the bytes that a rank sends."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
# The methods of torch's ProcessGroup, with their names in all versions of torch.
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
CALLERS = ("ds_ext", "deepspeed", "lomo_optim")


class Call(NamedTuple):
    """One collective call of one rank."""

    caller: str  # the package that made it
    kind: str  # all-reduce, …
    nbytes: int  # of the whole tensor that is summed or gathered


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Returns the bytes that each rank sends in a ring algorithm for a collective of ``nbytes``."""
    return (2 if kind == ALL_REDUCE else 1) * nbytes * (ranks - 1) / ranks


@contextlib.contextmanager
def noted() -> Iterator[list[Call]]:
    """Context that records this process's collectives; yields the list of calls."""
    # From vars(): getattr would return a C++ method that cannot be bound to an instance again.
    before = {name: own for name, own in vars(dist.ProcessGroup).items() if name in METHODS}
    calls: list[Call] = []
    for name, original in before.items():
        setattr(dist.ProcessGroup, name, _noting(original, METHODS[name], calls))
    try:
        yield calls
    finally:
        for name, original in before.items():
            setattr(dist.ProcessGroup, name, original)


def _noting(original: Callable[..., Any], kind: str, calls: list[Call]) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **options: Any) -> Any:
        # Either the inputs or the outputs are the whole tensor; the others are a part of it.
        sizes = [sum(t.nbytes for t in tree_leaves(x) if isinstance(t, Tensor)) for x in args]
        calls.append(Call(_caller(), kind, max(sizes)))
        return original(group, *args, **options)

    return method


def _caller() -> str:
    """The package that called the collective."""
    frame = sys._getframe().f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        # Other packages call torch through deepspeed.comm too.
        if package in CALLERS and not name.startswith("deepspeed.comm"):
            return package
        frame = frame.f_back
    return "other"
