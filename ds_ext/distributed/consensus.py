"""Agreement between ranks: a failure of one is raised on all, and differences are found.

If only one rank raises, the others wait in a collective until the process group's timeout. Code
that can fail on one rank therefore runs in ``run_on_all_ranks``. A rank that fails there sends its
error in place of the value that the other ranks gather next.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_ext import logs
from ds_ext.distributed.groups import Group, explained, tell, told
from ds_ext.errors import CheckpointError, LostRankError

T = TypeVar("T")
MESSAGE = 16  # bytes that each rank sends to compare
PATIENCE = 30.0  # seconds after which a rank says whom it waits for


def several(group: Group = None) -> bool:
    """Returns whether ``group`` has more than one rank."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


def is_first() -> bool:
    """Returns whether this is the first rank, which logs for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def announced(function: str, group: Group = None) -> Iterator[None]:
    """Context of a function that all ranks call: warns if some have not called it after a while.

    A rank waits before it sends anything, because the next collective of a rank that is late may be
    another one, and would fail. After ``PATIENCE`` it goes on: a rank that is late may still come.
    Ranks count their calls in the store of the default process group. Of the ranks that have
    waited, the first one reads all counts and warns.

    Args:
        function: its name.
        group: the ranks; by default all.
    """
    if not several(group):
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
    calls = f"ds_ext/calls of {function} by {hash(tuple(ranks))}"
    counts = {r: f"{calls}/{r}" for r in ranks}
    absent: list[int] = []
    with explained():
        own = store.add(counts[rank], 1)
        in_time = _all_have_called(store, calls, own, len(ranks))
        if not in_time and store.add(f"{calls}/{own} have waited", 1) == 1:
            absent = [r for r, count in counts.items() if store.add(count, 0) < own]
    if absent:
        late = (
            f"rank {rank} has waited in {function} for {PATIENCE:g} s: "
            f"{_named(absent)} {'have' if len(absent) > 1 else 'has'} not called it. All ranks "
            f'must call {function}, not only rank 0 (remove "if rank == 0"). '
        )
        tell("late", late)
        logs.logger.warning(
            f"{late}It goes on if their next call is this one, and else ends with an error, at the "
            "latest at the process group's time limit."
        )
    yield


def _all_have_called(store: Any, calls: str, own: int, size: int) -> bool:
    """Waits for call number ``own`` of all ranks; returns whether it came within ``PATIENCE``."""
    key = f"{calls}/all of {{}}"
    if store.add(calls, 1) == own * size:
        store.set(key.format(own), "")
        store.delete_key(key.format(own - 1))  # which all have seen
        tell("late", "")
        return True
    try:
        store.wait([key.format(own)], timedelta(seconds=PATIENCE))
    except dist.DistStoreError:  # the time is over
        return False
    return True


def _named(ranks: list[int]) -> str:
    """Ranks in words, at most four of them."""
    more = f" and {len(ranks) - 4} more" * (len(ranks) > 4)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{more}"


class _Failure(NamedTuple):
    """What a rank sends if its action fails."""

    depth: int  # how many actions were nested
    kind: type[Exception]  # ValueError, RuntimeError or CheckpointError
    text: str

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        """The error of this rank's innermost action."""
        kind: type[Exception] = CheckpointError
        if isinstance(error, ValueError):
            kind = ValueError
        elif type(error) is RuntimeError:
            kind = RuntimeError
        is_known = isinstance(error, kind)
        text = (is_known and str(error)) or f"{type(error).__name__}: {error}"
        return cls(_depth.calls, kind, text)


class _FailedRanks(RuntimeError):
    """Raised in the actions of all ranks, until the outermost failed action catches it."""

    def __init__(self, told: dict[int, _Failure], size: int) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, failure in told.items():
            ranks.setdefault(failure.text, []).append(rank)
        said = (f"{_named(of)}: {text}" if len(of) < size else text for text, of in ranks.items())
        super().__init__("; ".join(said))
        self.depth = min(failure.depth for failure in told.values())
        self.kind = next(iter(told.values())).kind


class _Depth(threading.local):
    calls = 0  # nested ones of run_on_all_ranks


_depth = _Depth()


def gathered(value: T, group: Group = None) -> list[T]:
    """Returns the values of all ranks, in order; without a process group, this rank's.

    Raises:
        RuntimeError: another rank failed in ``run_on_all_ranks`` before it gathered a value.
    """
    values: list[Any] = [value]
    if several(group):
        values *= dist.get_world_size(group)
        with explained():
            dist.all_gather_object(values, value, group=group)
    told = {rank: given for rank, given in enumerate(values) if isinstance(given, _Failure)}
    if told:
        raise _FailedRanks(told, len(values))
    return values


def run_on_all_ranks(
    action: Callable[[], T], error: Callable[[str], Exception] | None = None, group: Group = None
) -> T:
    """Returns the result of ``action``; if it fails on one rank, raises an error on all.

    Args:
        action: what to run. It may call functions of this module with the same group. Any other
            collective must directly follow a call, because a failed rank does not take part in it.
        error: makes the error from its text. By default, a ValueError or RuntimeError keeps its
            type, and other errors become CheckpointError.
        group: the ranks.
    """
    _depth.calls += 1
    failed: Exception | None = None
    try:
        try:
            with explained():
                result = action()
        except (_FailedRanks, LostRankError):
            raise
        except Exception as caught:
            failed = caught
        gathered(failed and _Failure.of(failed), group)
    except _FailedRanks as found:
        if found.depth < _depth.calls:
            raise
        raise (error or found.kind)(str(found)) from failed
    finally:
        _depth.calls -= 1
    return result


def facts(
    model: nn.Module,
    optimizer: Optimizer | None,
    shape_of: Callable[[Tensor], tuple[int, ...]] = lambda param: tuple(param.shape),
) -> dict[str, Any]:
    """Returns the facts that must agree on ranks with the same model and optimizer."""
    names = {p: n for n, p in model.named_parameters()}
    return {
        "parameter": [
            f"{n}, {list(shape_of(p))}, {p.dtype}, requires_grad={p.requires_grad}"
            for p, n in names.items()
        ],
        "parameter group": [
            {**group, "params": [names.get(p) for p in group["params"]]}
            for group in (optimizer.param_groups if optimizer is not None else ())
        ],
    }


def require_equal(told: Mapping[str, Any], group: Group = None) -> None:
    """Raises ValueError on all ranks if they differ in a fact. The message names the difference."""
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    answers = gathered((digest, [*_told_errors]), group)
    # All ranks have read earlier errors, and a new engine may get to the same history.
    for key in {key for _, told_errors in answers for key in told_errors}:
        tell(key, "")
    _told_errors.clear()
    if len({theirs for theirs, _ in answers}) == 1:
        return
    everyone, ranks = gathered(dict(told), group), dist.get_process_group_ranks(group)
    for name in told:
        for rank, theirs in zip(ranks, everyone, strict=True):
            if theirs.get(name) != everyone[0].get(name):
                where = _difference(everyone[0].get(name), theirs.get(name))
                raise ValueError(
                    f"the ranks were started with different {name}s: rank {ranks[0]} and rank "
                    f"{rank} differ in {where}. Start all ranks with the same script, config and "
                    "model."
                )


def _difference(a: Any, b: Any, where: str = "") -> str:
    """The first difference of two nested values: its place, and both values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(k for k in b if k not in a)]:
            if a.get(key) != b.get(key) or (key in a) != (key in b):
                return _difference(a.get(key), b.get(key), f"{where}.{key}".lstrip("."))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return _difference(x, y, f"{where}[{i}]")
        return f"{where or 'their number'}: {len(a)} and {len(b)}"
    return f"{where + ': ' if where else ''}{a!r} and {b!r}"


DIFFERENT_PASSES = (
    "the ranks are in different backward passes or steps: an error has ended backward at different "
    "layers, a rank has left out a backward pass, or only some ranks have called load_state_dict. "
    "Gradients of different batches may have been added up. Stop all ranks and resume from a "
    "checkpoint; or call engine.destroy(), or .remove() on the object that fuse_into_backward "
    "returned, make the model anew, and load a checkpoint. A script that catches errors of "
    "backward must raise them on all ranks, for example after an all-reduce of a flag."
)
DROPPED = -1  # instead of a history
_told_errors: list[str] = []  # keys of this rank's errors since the last ``require_equal``


class RanksDifferError(RuntimeError):
    """Ranks whose histories differ: in different passes, or one of them by ``tell_error``.

    Args:
        history: this rank's; that of the others or, on a rank with an error, its complement.
    """

    def __init__(self, history: int) -> None:
        super().__init__(told(_error_key(history)) or DIFFERENT_PASSES)


def tell_error(history: int, error: Exception) -> int:
    """Returns the history to send instead, so that all ranks raise this rank's ``error``."""
    if dist.is_initialized():
        _told_errors.append(_error_key(history))
        tell(_told_errors[-1], f"rank {dist.get_rank()}: {error}")
    return ~history


def _error_key(history: int) -> str:
    return f"error {max(history, ~history)}"


class OrderCheck:
    """Compares the order in which ZeRO-3 ranks use modules; raises RuntimeError if it differs.

    A collective accepts whatever tensors the ranks pass. If they are of different parameters, the
    result is silently wrong; if their sizes differ, it fails or hangs. So the hosts compare a hash
    of what comes next: of every bucket of gradients and, in the first pass, of every gathered
    module. Later passes in another order are detected if their gradients differ.

    Without ``ahead``, no bucket that differs between ranks is reduced. With ``ahead``, the host
    reads the result for a bucket at the next comparison, so one such bucket may be reduced and
    stepped before the error is raised.
    """

    def __init__(
        self, module: nn.Module, names: Mapping[Tensor, str], group: Group, ahead: bool = False
    ) -> None:
        self.names = names
        self.group = group
        self.ahead = ahead
        self.number = {p: i for i, p in enumerate(names)}
        self.modules = {m: (i, name) for i, (name, m) in enumerate(module.named_modules())}
        self.is_alone = not several(group)
        # The comparison in progress: work, its result, history and words.
        self.asked: tuple[dist.Work, Tensor, int | None, Callable[[], list[str]]] | None = None

    def check_gradients(
        self, waiting: list[Tensor], in_parts: set[Tensor], ended: bool, history: int
    ) -> int:
        """Compares the parameters of a bucket over the ranks; returns the bytes sent.

        It also compares which of them may have further partial gradients, whether backward has
        ended, and ``Buckets.history``.
        """

        def words() -> list[str]:
            more = ", which may have further parts"
            said = [f"the gradient of {self.names[p]}{more * (p in in_parts)}" for p in waiting]
            return [*said, "the end of backward" if ended else "a full bucket"]

        numbers = [2 * self.number[p] + (p in in_parts) for p in waiting]
        self._begin_comparison((ended, *numbers), words, history)
        if ended or not self.ahead:
            self._end_comparison()
        return 0 if self.is_alone else MESSAGE

    def check_dropped(self) -> None:
        """Compares that all ranks drop the step in progress, and none is still in backward."""
        self._begin_comparison((), lambda: ["a step that is dropped"], DROPPED)
        self._end_comparison()

    def watch_first_pass(self, coordinator: Any) -> None:
        """Compares each module that DeepSpeed gathers, until DeepSpeed has recorded a pass."""
        fetch = coordinator.fetch_sub_module

        def fetch_sub_module(module: nn.Module, forward: bool) -> None:
            if coordinator.is_complete_trace():
                del coordinator.fetch_sub_module
            else:
                number, name = self.modules.get(module, (-1, "a module outside the model"))
                words = f"the {'forward' if forward else 'backward'} pass of {name or 'the model'}"
                self._begin_comparison((2 * number + forward,), lambda: [words])
                self._end_comparison()
            fetch(module, forward)

        coordinator.fetch_sub_module = fetch_sub_module

    def _begin_comparison(
        self, numbers: tuple[int, ...], words: Callable[[], list[str]], history: int | None = None
    ) -> None:
        """Begins to compare numbers over the ranks, by a 62-bit hash that all processes share."""
        self._end_comparison()  # the comparison before
        if self.is_alone:
            return
        digest = hash((history or 0, *numbers)) & (2**62 - 1)
        most = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        with explained():
            work = dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.asked = work, most, history, words

    def _end_comparison(self) -> None:
        """Waits for the comparison in progress; raises RuntimeError if the ranks differ."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        work, most, history, words = asked
        with explained():
            work.wait()
        if most[0] == -most[1]:
            return
        histories, told = zip(*gathered((history, words()), self.group), strict=True)
        if len({*histories} - {None}) > 1:
            raise RanksDifferError(history or 0)
        other = next(rank for rank, said in enumerate(told) if said != told[0])
        pairs = zip_longest(told[0], told[other], fillvalue="nothing")
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise RuntimeError(
            f"the ranks run different parts of the model: next is {first} on rank 0, and "
            f"{second} on rank {other}. At zero_optimization.stage 3 all ranks must use the same "
            "modules in the same order: pass modules that only some ranks use to "
            "deepspeed.utils.set_z3_leaf_modules, or set stage 2, 1 or 0, which do not need it."
        )
