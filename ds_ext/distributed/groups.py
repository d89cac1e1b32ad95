"""Process groups: of all ranks, of some, and with queues of their own; lost connections.

Each is created once per process, set of ranks and queue.

On a GPU, the collectives of a group wait for each other in one queue. ds_ext therefore uses two
groups in addition to DeepSpeed's: one for reductions of gradients, and one for the sums and the
publications of steps. A reduction does not wait for a step, and DeepSpeed's all-gathers wait for
neither. Gloo runs collectives in threads and needs no second group, which costs a connection to
each rank.

Groups last until ``torch.distributed.destroy_process_group``, because the ranks of an NCCL group
wait for each other when it ends, which would hang if one of them is lost.
"""

import atexit
import contextlib
import functools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from ds_ext.errors import LostRankError

Group: TypeAlias = "dist.ProcessGroup | None"

# Device types whose collectives do not wait for each other, or that compute nothing.
WITHOUT_QUEUES = {"cpu", "meta"}
ON_HOSTS = {"cpu", "meta"}  # device types whose values the host can read at once

# By backend (None: that of all ranks), queue ("" for groups that DeepSpeed may use too) and ranks.
_made: dict[tuple[str | None, str, tuple[int, ...]], dist.ProcessGroup] = {}
_counts: Counter[tuple[int, ...]] = Counter()  # groups made, by ranks; the same on all of them


def everyone() -> Group:
    """Returns the group of all processes, None without a process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def require_group_of_launcher(caller: str) -> None:
    """Raises RuntimeError where a launcher started several ranks that have no process group."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size not in {"", "0", "1"} and not dist.is_initialized():
        raise RuntimeError(
            f"{caller}: WORLD_SIZE is {size}, but there is no process group, so each process "
            "would train a model of its own. Call torch.distributed.init_process_group() first, "
            "or unset WORLD_SIZE for independent runs."
        )


def size_of(group: Group) -> int:
    """Returns how many ranks a group has, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def communicates(group: Group) -> bool:
    """Returns whether to call collectives of a group, which change nothing on a single rank.

    With ``DS_EXT_COMMUNICATE_ALONE=1`` a single rank calls them too, to test them on one GPU.
    """
    if group is None:
        return False
    return size_of(group) > 1 or os.environ.get("DS_EXT_COMMUNICATE_ALONE") == "1"


def with_own_queue(group: Group, device: torch.device, queue: str = "steps") -> Group:
    """Returns a group of the same ranks whose collectives on ``device`` wait in a queue of ours.

    All ranks of ``group`` call it, in the same order for groups that share ranks. ``queue`` is
    "steps" or "reductions".
    """
    if device.type not in WITHOUT_QUEUES:
        return _twin(group, None, queue)
    # Weights may be offloaded to the host while ranks communicate by NCCL.
    if group is None or device.type in {"meta", *(d.type for d in group._device_types)}:
        return group
    return _twin(group, "gloo", queue)


def of_ranks(ranks: tuple[int, ...]) -> Group:
    """Returns a group of global ranks, in their order. All of them call it."""
    world = everyone()
    if len(ranks) < 2 or world is None:
        return None
    if sorted(ranks) == dist.get_process_group_ranks(world):
        return world
    return _cached(ranks, world)


def alone() -> Group:
    """Returns a group of only this process; None without a process group."""
    world = everyone()
    if world is None or size_of(world) == 1:
        return world
    return _cached((dist.get_rank(),), world)


def for_hosts(group: Group, device: torch.device) -> Group:
    """Returns a group of the same ranks for messages between hosts, which wait for no GPU."""
    if communicates(group):
        _wait_at_exit()
    return group if device.type in ON_HOSTS else _twin(group, "gloo", "hosts")


@functools.cache
def _wait_at_exit() -> None:
    """Lets this process wait at its end until gloo's threads have freed their last tensors.

    A thread that needs Python's lock for that when the interpreter has ended aborts the process.
    """
    atexit.register(time.sleep, 0.05)  # a thread gets the lock within 5 ms


def _twin(group: Group, backend: str | None, queue: str) -> Group:
    """The group of these ranks with a backend and a queue."""
    if group is None or not communicates(group):
        return group
    return _cached(tuple(dist.get_process_group_ranks(group)), group, backend, queue)


def _cached(
    ranks: tuple[int, ...], like: dist.ProcessGroup, backend: str | None = None, queue: str = ""
) -> dist.ProcessGroup:
    """The group that was made earlier, or a new one with the time limit of ``like``."""
    made = _made.get((backend, queue, ranks))
    if made is not None and made in dist.distributed_c10d._world.pg_map:  # it was not destroyed
        return made
    # Torch would name the group by the number of groups in this process. If one was destroyed, or
    # a rank has more, ranks would wait for each other under old or different names.
    _counts[ranks] += 1
    name = f"ds_ext:{'_'.join(map(str, ranks))}:{_counts[ranks]}"
    # If ``init_process_group`` was given a device, torch would split the communicator of all ranks,
    # in which all of them have to take part.
    with (
        with_attribute(dist.distributed_c10d, "_hash_ranks_to_str", lambda ranks: name),
        with_attribute(everyone(), "bound_device_id", None),
    ):
        made = dist.new_group(
            list(ranks), timeout=_timeout(like), backend=backend, use_local_synchronization=True
        )
    assert isinstance(made, dist.ProcessGroup)
    _made[backend, queue, ranks] = made
    return made


def made() -> list[dist.ProcessGroup]:
    """Returns the groups that were made here, and not destroyed."""
    return [group for group in _made.values() if group in dist.distributed_c10d._world.pg_map]


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group's collectives."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


@contextlib.contextmanager
def with_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# Signs that a peer has ended or is late: words in gloo's errors; NCCL raises DistError.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket (closed|timeout)|"
    r"remote (process|peer) (exited|closed)|failed to (recv|connect)|no route to host",
    re.IGNORECASE,
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context that replaces errors of lost connections by LostRankError, which explains them."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise LostRankError(
            "another rank has ended, or did not respond within the time limit of the process group "
            "(timeout of init_process_group or deepspeed.init_distributed). The first error in the "
            "other ranks' output shows the cause; if there is none, a rank has made fewer steps or "
            "left out backward or step(). Saved checkpoints are unchanged: restart from the newest "
            f"complete one. {told('late')}The error of the connection: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def tell(key: str, text: str) -> None:
    """Leaves a text for other ranks in the store of the default process group, if there is one."""
    if dist.is_initialized():
        dist.distributed_c10d._get_default_store().set(f"ds_ext/told/{key}", text)


def told(key: str) -> str:
    """Returns the text that a rank has left, "" if none has or the store has ended."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([f"ds_ext/told/{key}"]):
            text: bytes = store.get(f"ds_ext/told/{key}")
            return text.decode()
    return ""


def wait_for(waits: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """Returns a function that runs the waits of collectives, with ``explained`` errors."""

    def wait_for_all() -> None:
        with explained():
            for wait in waits:
                wait()

    return wait_for_all
