"""Which runs of a bucket are stepped as one batch: those that have all but their tensors in common.

A rule that is registered as ``is_batched`` then makes one pass over all of them where it would make
one over each. Others, and parameters that no pass over batches takes, are stepped one by one. Which
are which is the same on all ranks, for the ranks' sums have to be in the same order: ranks of one
world have devices of one kind.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ext import rules
from ds_ext.ops import weight_update
from ds_ext.ops.batch import Batch, Pointers, Runs, kind, may_join, stacked
from ds_ext.ops.native import table
from ds_ext.ops.rounding import ROUND
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.ops.triton import devices
from ds_ext.optimizer import expert_stacks, fitting

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer
    from ds_ext.optimizer.run_updates import RunUpdate, StagedRun

State = dict[str, Any]


class Piece(NamedTuple):
    """What is stepped as one matrix, or vector: a parameter's run, or that of one expert."""

    at: int  # of the bucket's updates
    shard: Shard
    number: int  # of the parameter
    first: int  # number of the run's first element in the parameter
    run: slice | None = None  # of the parameter's run, if it is an expert's
    expert: str = ""

    def of(self, run: Tensor) -> Tensor:
        """Returns the piece of a parameter's run."""
        return run if self.run is None else run[self.run]

    def state(self, state: State) -> State:
        """Returns the piece's part of a parameter's state."""
        return state if self.run is None else state[expert_stacks.EXPERTS][self.expert]


class Group:
    """Pieces that are stepped as one batch, by the rule of one param group.

    Args:
        row: the param group's number.
        pieces: the pieces.
        parts: what is kept of each.
        device: where they are stepped.
    """

    def __init__(
        self, row: int, pieces: Sequence[Piece], parts: Parts, device: torch.device
    ) -> None:
        self.row, self.pieces, self.parts, self.device = row, pieces, parts, device
        self.batch = Batch([x.shard for x in pieces], [x.first for x in pieces], device)
        self.numbers = np.array([x.number for x in pieces], dtype=np.uint64)
        self.known = self.batch.known()
        self._kept: dict[str, Any] | None = None  # of the step in progress
        self._seen: list[tuple[list[int], list[torch.dtype]]] = []
        self._where: list[Pointers] = []

    def note(self, states: Sequence[State]) -> None:
        """Takes the states of the bucket, which were checked, for what is to be kept."""
        runs = list(_runs(self.kept(states)))
        self._seen, self._where = list(map(_sizes, runs)), [x.pointers for x in runs]

    def fits(self, states: Sequence[State]) -> bool:
        """Whether what is kept has the sizes and dtypes of what was noted.

        Passes read and write as much as was noted, wherever tensors lie now.
        """
        self._kept = None  # of a step that was not made
        try:
            kept = self.kept(states)
            runs = list(_runs(kept))
            if list(map(_sizes, runs)) != self._seen:
                return False
        except (KeyError, AttributeError, TypeError):  # something else was put there
            return False
        for i, run in enumerate(runs):
            if not np.array_equal(run.pointers, self._where[i]):
                if not all(x.is_contiguous() and x.device == self.device for x in run.tensors):
                    return False
                self._where[i] = run.pointers
        self._kept = kept
        return True

    def kept(self, states: Sequence[State]) -> dict[str, Any]:
        """Returns what is kept of the pieces, as one state; ``states`` are those of the bucket."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        return stacked([piece.state(states[piece.at]) for piece in self.pieces], self.parts)


def _runs(kept: Mapping[str, Any]) -> Iterator[Runs]:
    """The runs of a state that is nested in dicts."""
    for x in kept.values():
        yield from _runs(x) if isinstance(x, dict) else (x,)


def _sizes(runs: Runs) -> tuple[list[int], list[torch.dtype]]:
    return [x.numel() for x in runs.tensors], [x.dtype for x in runs.tensors]


class Plan:
    """How the runs of a bucket are stepped: in groups, or alone.

    Args:
        optimizer: whose parameters they are of.
        updates: the bucket's runs.
        states: their states.
    """

    def __init__(
        self, optimizer: "RuleOptimizer", updates: Sequence["RunUpdate"], states: Sequence[State]
    ) -> None:
        self.kinds = list(map(_kind, updates))
        device = updates[0].g.device
        self.halves = [i for i, u in enumerate(updates) if u.p.dtype in ROUND]
        self.alone: list[int] = []
        self.joined: list[int] = []
        found: dict[tuple[Any, ...], list[Piece]] = {}
        rows = {optimizer.row_of[u.param]: u.param for u in updates}
        for i, (u, state) in enumerate(zip(updates, states, strict=True)):
            dtypes = u.p.dtype, u.g.dtype
            is_batched = are_batched(optimizer, u.param, u.shard, dtypes, device)
            pieces = _pieces(optimizer, i, u, state) if is_batched else []
            if not pieces:
                self.alone.append(i)
                continue
            self.joined.append(i)
            is_stack = u.param in optimizer.stacks  # whose gradient is judged as a whole
            row = optimizer.row_of[u.param]
            common = row, is_stack, state["step"], u.p.dtype, u.g.dtype
            for piece in pieces:
                found.setdefault((*common, *kind(piece.shard)), []).append(piece)
        self.rules = {row: _form(optimizer.rule_of(param)) for row, param in rows.items()}
        self.groups = [
            Group(row, pieces, optimizer.rule_of(rows[row]).keeps(pieces[0].shard), device)
            for (row, *_), pieces in found.items()
        ]
        for group in self.groups:
            group.note(states)
        self.rows = [optimizer.row_of[updates[i].param] for i in self.joined]
        self.memory_sizes = [0, 0, 0]  # see ``Memory``: what steps of the bucket have used

    def fits(
        self,
        optimizer: "RuleOptimizer",
        updates: Sequence["RunUpdate"],
        states: Sequence[State],
    ) -> bool:
        """Whether it is still how these runs, of the same parameters, are stepped."""
        if list(map(_kind, updates)) != self.kinds:
            return False
        return (
            all(_form(optimizer.rule_at(row)) == form for row, form in self.rules.items())
            and all(weight_update.has_fitting_master(updates[i].p, states[i]) for i in self.halves)
            and all(group.fits(states) for group in self.groups)
            and all(len({states[x.at]["step"] for x in group.pieces}) == 1 for group in self.groups)
        )


class Plans:
    """The plans of buckets that were stepped."""

    MOST = 4096  # that are remembered; more come up only where each step has others

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Plan] = {}  # by parameters, and where they are stepped

    def clear(self) -> None:
        """Forgets all: groups, or which parameters are stacks, have changed."""
        self._made.clear()

    def prepare(
        self, optimizer: "RuleOptimizer", staged: Sequence["StagedRun"], is_batched: bool
    ) -> Plan | None:
        """Makes the states that a bucket lacks, and checks the others.

        Args:
            optimizer: that steps it.
            staged: its runs.
            is_batched: whether some may be stepped together.

        Returns:
            Its plan, if it is batched; the steps of the batched runs are then counted.

        Raises:
            ValueError: a run or its state does not fit its parameter; no state is changed.
        """
        new = [run for run in staged if not run.state]
        try:
            for run in new:
                fitting.make(optimizer, run.update, run.state)
            if is_batched:
                return self._of(optimizer, staged)
            for run in staged:
                fitting.check(optimizer, run.update, run.state)
        except ValueError:
            for run in new:
                run.state.clear()
            raise
        return None

    def _of(self, optimizer: "RuleOptimizer", staged: Sequence["StagedRun"]) -> Plan:
        """Returns the plan of a bucket, whose states are made."""
        updates = [run.update for run in staged]
        states: list[State] = [run.state for run in staged]
        key = *[id(u.param) for u in updates], updates[0].g.device
        plan = self._made.get(key)
        is_new = plan is None or not plan.fits(optimizer, updates, states)
        for i in range(len(updates)) if is_new or plan is None else plan.alone:
            fitting.check(optimizer, updates[i], states[i])
        if is_new or plan is None:
            if len(self._made) >= self.MOST:
                self._made.clear()
            plan = self._made[key] = Plan(optimizer, updates, states)
        for i in plan.joined:
            states[i]["step"] += 1
        return plan

    def forget_sums(self, params: Iterable[Tensor]) -> None:
        """Forgets what is known of the weights of ``params``, which a step has left as they were.

        What it would have noted of them is older than edits that came before it.
        """
        left = {id(p) for p in params}
        for key, plan in self._made.items():
            for group in plan.groups:
                if any(key[piece.at] in left for piece in group.pieces):
                    group.known.forget()

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._made.values())


def _kind(u: "RunUpdate") -> tuple[Any, ...]:
    """What of a run a plan depends on."""
    return u.shard, u.p.dtype, u.g.dtype, u.p.numel(), u.g.numel()


def _form(rule: Any) -> tuple[Any, ...]:
    """What of a rule a plan depends on: hyper-parameters that may decide what is kept."""
    return tuple(
        (type(x), bool(x)) if isinstance(x, (float, tuple)) else x
        for name, x in vars(rule).items()
        if name not in ("lr", "weight_decay")
    )


def notes_sums(rule: Any, shard: Shard) -> bool:
    """Returns whether kernels note sums of squares of a run's weights as they write them.

    They do for rules that step in proportion to the weights, which are known by these sums.
    """
    entry = rules.entry_of(type(rule))
    return entry.is_relative(rule) and entry.batches(rule, shard)


def are_batched(
    optimizer: "RuleOptimizer",
    param: Tensor,
    shard: Shard,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> bool:
    """Returns whether a run is stepped in a batch; the same on all ranks.

    Args:
        optimizer: that steps it.
        param: whose run it is.
        shard: which elements it is.
        dtypes: of weight and gradient.
        device: of the gradient.
    """
    if not may_join(shard) or not all(dtype in table.DTYPES for dtype in dtypes):
        return False
    shards = [shard]
    if param in optimizer.stacks:
        shards = [own for _, own in expert_stacks.split(shard)]
    if devices.take(device) and not all(map(devices.take_matrices, shards)):
        return False
    rule = optimizer.rule_of(param)
    entry = rules.entry_of(type(rule))
    return all(entry.batches(rule, own) for own in shards)


def _pieces(optimizer: "RuleOptimizer", at: int, u: "RunUpdate", state: State) -> list[Piece]:
    number, start = optimizer.number_of[u.param], u.shard.start
    if u.param not in optimizer.stacks:
        return [Piece(at, u.shard, number, start)]
    first = optimizer.elements_before(u) + start
    found = zip(state[expert_stacks.EXPERTS], expert_stacks.split(u.shard), strict=True)
    return [
        Piece(at, shard, number, first + run.start, run, expert) for expert, (run, shard) in found
    ]
