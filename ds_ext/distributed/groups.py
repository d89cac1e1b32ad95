"""Process groups of the same ranks as others, made once in a process.

On a GPU the collectives of a group wait for each other, in one queue: DeepSpeed's gathering of the
next layers would wait for a rule's sums, which wait for the gradients that they are of. So sums
travel on groups of their own there. Gloo's collectives have threads, and need no second group,
which would cost a connection to each rank.

They last until ``torch.distributed.destroy_process_group``, for all engines of a process: to end
one of NCCL's its ranks wait for each other, which must not be when one of them is lost.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_ext.distributed.placement import Group, everyone, size_of

# Kinds of devices whose collectives do not wait for each other, and those that compute nothing.
WITHOUT_QUEUES = {"cpu", "meta"}
ON_HOSTS = {"cpu", "meta"}  # what is known there is known to the host

_made: dict[tuple[str | None, tuple[int, ...]], dist.ProcessGroup] = {}
_counts: Counter[tuple[int, ...]] = Counter()  # groups made, by ranks; the same on all of them


def for_sums(group: Group, device: torch.device) -> Group:
    """Returns the group over which sums on ``device`` are added up, of the ranks of ``group``.

    All ranks of the group call it, and in the same order for groups that share ranks.
    """
    if device.type not in WITHOUT_QUEUES:
        return _twin(group, device, None)
    # Weights that are offloaded to the host, of ranks that talk by their GPUs.
    return group if group is None or _reaches(group, device) else _twin(group, device, "gloo")


def of_ranks(ranks: tuple[int, ...]) -> Group:
    """Returns a group of global ranks, in their order, which all of them ask for alike."""
    world = everyone()
    if len(ranks) < 2 or world is None:
        return None
    if sorted(ranks) == dist.get_process_group_ranks(world):
        return world
    made = _made.get((None, ranks))
    if made is None or made not in dist.distributed_c10d._world.pg_map:
        made = _new(ranks, _timeout(world), None)
    return made


def alone() -> Group:
    """Returns a group of this process alone, None without a process group."""
    world = everyone()
    if world is None or size_of(world) == 1:
        return world
    ranks = (dist.get_rank(),)
    made = _made.get((None, ranks))
    if made is None or made not in dist.distributed_c10d._world.pg_map:
        made = _new(ranks, _timeout(world), None)
    return made


def divided(group: Group, size: int) -> tuple[Group, Group]:
    """Divides the ranks of a group into groups of ``size`` consecutive ones.

    All ranks of the group call it.

    Args:
        group: the ranks.
        size: divides their number.

    Returns:
        This rank's group, and that of the ranks which have its place in the others; None for one
        rank.
    """
    if group is None:
        return None, None
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    first = rank - rank % size
    return of_ranks(tuple(ranks[first : first + size])), of_ranks(tuple(ranks[rank % size :: size]))


def for_hosts(group: Group, device: torch.device) -> Group:
    """The same for what hosts tell each other: what a GPU computes is not waited for."""
    return group if device.type in ON_HOSTS else _twin(group, device, "gloo")


def _twin(group: Group, device: torch.device, backend: str | None) -> Group:
    """The one group of these ranks and ``backend``, None for that of the group of all."""
    if group is None or size_of(group) == 1:
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _made.get((backend, ranks))
    if made is None or made not in dist.distributed_c10d._world.pg_map:  # it was destroyed since
        made = _new(ranks, _timeout(group), backend)
    return made


def _new(ranks: tuple[int, ...], timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    with _named(ranks):
        made = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
        )
    assert isinstance(made, dist.ProcessGroup)
    _made[backend, ranks] = made
    return made


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a group's collectives wait."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def _reaches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on ``device`` can be sent over a group."""
    return device.type == "meta" or device.type in {d.type for d in group._device_types}


@contextlib.contextmanager
def _named(ranks: tuple[int, ...]) -> Iterator[None]:
    """Names the group that is made by its ranks and how many of them were made so far.

    Torch would take the number of groups that this process has now, of whatever ranks: where
    another was destroyed before, or a rank has more of them, ranks would wait for each other under
    names that are old or differ.
    """
    _counts[ranks] += 1
    name = f"ds_ext:{'_'.join(map(str, ranks))}:{_counts[ranks]}"
    torchs = dist.distributed_c10d._hash_ranks_to_str
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        dist.distributed_c10d._hash_ranks_to_str = torchs
