"""Runs of a bucket that are stepped as one batch: those that have all but their tensors in common.

A rule that is registered as ``is_batched`` then makes one pass over all of them where it would make
one over each. Others, and parameters that no pass over batches takes, are stepped one by one. Which
are which is the same on all ranks, for the ranks' sums have to be in the same order: ranks of one
world have devices of one kind.

A ``Plan`` is what does not change from step to step of a bucket: its batches and their tables.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import ops, rules
from ds_ext.distributed import lockstep
from ds_ext.ops import batched, weight_update
from ds_ext.ops.batch import Batch, Flat, Known, Placed, Runs, kind, may_join, stacked
from ds_ext.ops.formulas import Formula
from ds_ext.ops.native import table
from ds_ext.ops.shard import Shard
from ds_ext.ops.triton import devices, launches, memory, verdicts
from ds_ext.ops.triton.memory import Memory
from ds_ext.ops.triton.passes import Table as KernelTable
from ds_ext.optimizer import expert_stacks, verdict

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
    """Pieces that are stepped as one batch, by the rule of one param group."""

    def __init__(self, row: int, pieces: Sequence[Piece], device: torch.device) -> None:
        self.row, self.pieces = row, pieces
        self.batch = Batch([x.shard for x in pieces], [x.first for x in pieces], device)
        self.numbers = np.array([x.number for x in pieces], dtype=np.uint64)
        self.known = self.batch.known()


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
        self.alone: list[int] = []
        self.joined: list[int] = []
        found: dict[tuple[Any, ...], list[Piece]] = {}
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
        self.groups = [Group(row, pieces, device) for (row, *_), pieces in found.items()]
        self.rows = [optimizer.row_of[updates[i].param] for i in self.joined]
        self.memory_sizes = [0, 0, 0]  # see ``Memory``: what steps of the bucket have used

    def fits(self, updates: Sequence["RunUpdate"], states: Sequence[State]) -> bool:
        """Whether it is still how these runs, of the same parameters, are stepped."""
        if list(map(_kind, updates)) != self.kinds:
            return False
        return all(len({states[x.at]["step"] for x in group.pieces}) == 1 for group in self.groups)


class Plans:
    """The plans of buckets that were stepped."""

    MOST = 4096  # that are remembered; more come up only where each step has others

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Plan] = {}

    def clear(self) -> None:
        """Forgets all: groups, or which parameters are stacks, have changed."""
        self._made.clear()

    def of(self, optimizer: "RuleOptimizer", staged: Sequence["StagedRun"]) -> Plan:
        """Returns the plan of a bucket, whose states are made; counts the batched runs' steps."""
        updates = [run.update for run in staged]
        states: list[State] = [run.state for run in staged]
        key = tuple([id(u.param) for u in updates])
        plan = self._made.get(key)
        if plan is None or not plan.fits(updates, states):
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


class BatchedStep:
    """The step of a group of a bucket's runs."""

    def __init__(
        self,
        optimizer: "RuleOptimizer",
        group: Group,
        updates: Sequence["RunUpdate"],
        states: Sequence[State],
    ) -> None:
        self.meter, self.updates, self.of = optimizer.meter, updates, states
        self.rule = optimizer.rule_of(updates[group.pieces[0].at].param)
        self.t = states[group.pieces[0].at]["step"]
        self._take(group)

    def _take(self, group: Group) -> None:
        """Makes it the step of ``group``."""
        self.group, self.batch = group, group.batch
        self.params = [self.updates[piece.at].param for piece in group.pieces]
        self.states = [piece.state(self.of[piece.at]) for piece in group.pieces]
        self.runs = Runs([piece.of(self.updates[piece.at].p) for piece in group.pieces])
        self.masters = None
        if "master" in self.of[group.pieces[0].at]:
            self.masters = Runs([x.of(self.of[x.at]["master"]) for x in group.pieces])
        self.gradients = _gradients(group, self.updates)
        self.sums: list[Tensor] = []  # the meter's, for each piece
        self.totals: Tensor | None = None  # [2 n], of those on a GPU

    def begin(self) -> lockstep.Rule:
        """Returns the rule's generator, which steps all of them."""
        p = weight_update.weights(self.runs, self.masters, self.rule, self.group.numbers, self.t)
        self.group.known.check(self.runs)
        p = replace(p, known=self.group.known)
        if self.meter is not None:
            self.sums = [
                self.meter.sums_of(x.number, self.group.row, run, self.updates[x.at].num_replicas)
                for run, x in zip(self.runs.tensors, self.group.pieces, strict=True)
            ]
            p = replace(p, measured=self._measured())
        step: lockstep.Rule = self.rule.step(
            p, self.gradients, stacked(self.states), self.t, self.batch
        )
        return step

    def _measured(self) -> Runs | Flat:
        """Where two sums of each parameter go: to the meter's, or to be added to those."""
        if not devices.take(self.batch.device):
            return Runs(self.sums)
        n = len(self.sums)
        self.totals = torch.zeros(2 * n, dtype=torch.float32, device=self.batch.device)
        return Flat(self.totals, 2 * np.arange(n))

    def squares(self) -> Tensor:
        """Returns the sums of the squares of gradients, [n], without a pass if one has made them.

        On a GPU as a formula.
        """
        g = self.gradients
        known: Tensor | None = batched.added_up(g, self.batch)
        return ops.square_sum(g, cast(Shard, self.batch), g) if known is None else known

    def most(self) -> NDArray[np.float32]:
        """Returns what their totals may be, [n]."""
        numel = np.array([shard.numel for shard in self.batch.shards], dtype=np.float32)
        bounds: NDArray[np.float32] = verdict.most(numel, torch.float32)
        return bounds

    def by_squares(self, totals: Tensor) -> verdicts.Verdict:
        """Returns the verdict by those totals, [n] on the device."""
        return verdicts.Verdict(Flat(totals, np.arange(len(totals))), self.most())

    def by_votes(self, votes: Mapping[Tensor, Tensor]) -> verdicts.Verdict:
        """Returns the verdict by votes on the device."""
        found = [votes[param] for param in self.params]
        pointers = np.array([x.data_ptr() for x in found], dtype=np.int64)
        most = np.full(len(found), verdict.ARE_GOOD, dtype=np.float32)
        return verdicts.Verdict(Placed(pointers, found), most)

    def tell(self, by: verdicts.Verdict, told: verdict.Told | None, is_square: bool) -> None:
        """Lets the device note what it judges by, for the host to read when the step ends."""
        assert told is not None, "nobody would be told of gradients that are judged on a device"
        at = told.places(self.params, by.most, is_square, self.batch.device)
        cast(KernelTable, self.batch.own).tell(by, at)

    def drop(self, good: NDArray[np.bool_]) -> bool:
        """Leaves parameters as they were before the step, but for some -> whether some remain."""
        if self.meter is not None:  # which those that remain are told of anew
            for piece in self.group.pieces:
                self.meter.forget(piece.number)
        pieces = list(zip(self.group.pieces, good, strict=True))
        for piece, is_good in pieces:
            if not is_good:
                take_back(self.of[piece.at])
        remaining = [piece for piece, is_good in pieces if is_good]
        if remaining:
            self._take(Group(self.group.row, remaining, self.runs.device))
        else:
            self.runs = Runs([])
        return bool(remaining)

    def end(self, written: dict[Known, Runs]) -> None:
        """Tells torch of the change, and notes what sums belong to the weights as they are now."""
        if self.totals is not None:
            alike: dict[int, list[int]] = {}
            for i, sums in enumerate(self.sums):
                alike.setdefault(id(sums), []).append(i)
            totals = self.totals.view(-1, 2).double()
            for some in alike.values():
                self.sums[some[0]] += torch.stack([totals[i] for i in some]).sum(0)
        for run in self.runs.tensors:
            torch.autograd.graph.increment_version(run)
        written[self.group.known] = self.runs


class LoneStep:
    """The step of a run by itself."""

    def __init__(self, optimizer: "RuleOptimizer", run: "StagedRun") -> None:
        self.optimizer, self.run = optimizer, run
        self.params = [run.update.param]

    def begin(self) -> lockstep.Rule:
        """Returns the rule's generator."""
        (rule,) = self.optimizer.rules(self.run.update, self.run.state)
        return rule

    def squares(self) -> Tensor:
        """Returns the sum of the squares of its gradient, [1]."""
        g = self.run.update.g
        return ops.square_sum(g, self.run.update.shard, g).view(1)

    def most(self) -> float:
        """Returns what its total may be."""
        bound: float = verdict.most(self.run.update.shard.numel, self.run.update.g.dtype)
        return bound

    def drop(self, good: NDArray[np.bool_]) -> bool:
        """Leaves the parameter as it was before the step."""
        if self.optimizer.meter is not None:
            self.optimizer.meter.forget(self.optimizer.number_of[self.run.update.param])
        take_back(self.run.state)
        return False


class BucketStep:
    """The step of a bucket's runs, in batches as ``plan`` has it; all alone without one.

    Attributes:
        rules: generators of partial sums, in the same order on all ranks.
    """

    def __init__(
        self,
        optimizer: "RuleOptimizer",
        staged: Sequence["StagedRun"],
        plan: Plan | None,
        judge: verdict.Verdict,
    ) -> None:
        self.staged, self.optimizer, self.judge = staged, optimizer, judge
        self.alone = staged if plan is None else [staged[i] for i in plan.alone]
        self.batches: list[BatchedStep] = []
        self.plan, self.memory = plan, _memory(plan, staged)
        self.joined = [] if plan is None else [staged[i] for i in plan.joined]
        if plan is not None:
            updates, states = [run.update for run in staged], [run.state for run in staged]
            of_groups = {i: optimizer.param_groups[i]["params"][0] for i in {*plan.rows}}
            rules = {i: optimizer.rule_of(param) for i, param in of_groups.items()}
            with memory.using(self.memory), launches.together():
                weight_update.prepare_all(
                    [run.update.p for run in self.joined],
                    [run.state for run in self.joined],
                    [rules[i] for i in plan.rows],
                )
            self.batches = [BatchedStep(optimizer, x, updates, states) for x in plan.groups]
        self.rules = [self._judged(batch) for batch in self.batches]
        with launches.together() as next_parameter:
            for run in self.alone:
                if run.update.param in judge.params:
                    self.rules.append(self._judged(LoneStep(optimizer, run)))
                else:
                    self.rules += optimizer.rules(run.update, run.state)
                next_parameter()

    def _judged(self, step: BatchedStep | LoneStep) -> lockstep.Rule:
        """The rule of a step that its first round may end, where gradients are judged so."""
        how = {(p in self.judge.params, p in self.judge.votes) for p in step.params}
        assert len(how) == 1, "gradients of a batch are all judged alike"
        ((by_sums, by_votes),) = how
        if self.memory is not None and isinstance(step, BatchedStep):
            by = step.by_votes(self.judge.votes) if by_votes else None
            return _on_device(step, step.begin(), self.memory, by, by_sums, self.judge.told)
        return verdict.judged(step, self.judge) if by_sums else step.begin()

    def end(self) -> None:
        """Stores what was stepped, after the rules have ended."""
        for batch in self.batches:
            batch.end(self.optimizer.written)
        with memory.using(self.memory), launches.together() as next_parameter:
            weight_update.mark_all(
                [run.update.p for run in self.joined], [run.state for run in self.joined]
            )
            next_parameter()
            for run in self.alone:
                weight_update.mark(run.update.p, run.state)
                next_parameter()
        bad = self.judge.bad
        for run in self.staged:
            if not bad or run.update.param not in bad:
                run.write_back(self.optimizer.offload)
            elif not self.optimizer.state[run.update.param]:
                del self.optimizer.state[run.update.param]
        if self.plan is not None and self.memory is not None:
            self.plan.memory_sizes = [*map(max, self.plan.memory_sizes, self.memory.used)]


def _memory(plan: Plan | None, staged: Sequence["StagedRun"]) -> Memory | None:
    """Memory for the launches of a bucket on a GPU."""
    device = staged[0].update.g.device if staged else None
    if plan is None or device is None or not devices.take(device):
        return None
    return Memory(device, plan.memory_sizes)


def _on_device(
    step: BatchedStep,
    rule: lockstep.Rule,
    own: Memory,
    by: verdicts.Verdict | None,
    by_sums: bool,
    told: verdict.Told | None,
) -> lockstep.Rule:
    """A rule of a batch on a GPU, whose numbers are formulas, as a rule of tensors.

    Passes are judged ``by`` votes if these are given, or by the sums of the first round.
    """
    if by is not None:
        with memory.using(own):
            step.tell(by, told, is_square=False)
        launches.next_rule()
    asked = _next(rule, None, own, by)
    if by_sums:
        launches.next_rule()  # this pass, if there is one, runs beside those before it
        with memory.using(own):
            squares = cast(Formula, step.squares())
        *totals, found = yield (*_values(asked), squares.values)
        by = step.by_squares(found)
        with memory.using(own):
            step.tell(by, told, is_square=True)
        launches.next_rule()
        asked = _next(rule, _answers(asked, totals), own, by)
    while asked:
        answers = yield _values(asked)
        asked = _next(rule, _answers(asked, answers), own, by)


def _values(sums: Iterable[Any]) -> tuple[Tensor, ...]:
    """Sums as tensors."""
    return tuple(x.values if isinstance(x, Formula) else x for x in sums)


def _answers(sums: Iterable[Any], totals: Iterable[Tensor]) -> tuple[Any, ...]:
    """Their totals as they were asked for."""
    pairs = zip(sums, totals, strict=True)
    return tuple(Formula.given(x) if isinstance(asked, Formula) else x for asked, x in pairs)


def _next(
    rule: Any, totals: tuple[Any, ...] | None, own: Memory, by: verdicts.Verdict | None
) -> tuple[Any, ...]:
    """What a rule asks for next, nothing at its end; its launches take the bucket's memory."""
    with memory.using(own), verdicts.using(by):
        try:
            asked: tuple[Any, ...] = next(rule) if totals is None else rule.send(totals)
            while not asked:  # which takes no round
                asked = rule.send(())
            return asked
        except StopIteration:
            return ()


def take_back(state: State) -> None:
    """Makes a state that of a step before, to which nothing but the number of steps was written."""
    state["step"] -= 1
    if not state["step"]:
        state.clear()


def _kind(u: "RunUpdate") -> tuple[Any, ...]:
    """What of a run a plan depends on."""
    return u.shard, u.p.dtype, u.g.dtype


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


def _gradients(group: Group, updates: Sequence["RunUpdate"]) -> Any:
    """The gradients of a group: runs, or those times a factor of each and within a bound.

    Some may have no factor: what tensor parallelism has left whole is of more losses than the rest.
    """
    runs: list[Tensor] = []
    factors: list[Any] = []
    bound, are_scaled = None, False
    for piece in group.pieces:
        g: Any = updates[piece.at].g
        factors.append(1.0 if isinstance(g, Tensor) else g.factor)
        if not isinstance(g, Tensor):
            are_scaled, bound, g = True, g.bound, g.x
        runs.append(piece.of(g))
    if not are_scaled:
        return Runs(runs)
    return ops.Scaled(cast(Tensor, Runs(runs)), _vector(factors, runs[0].device), bound)


def _vector(numbers: Sequence[Any], device: torch.device) -> Any:
    """Numbers of each parameter, some of which may be on its device, [n] or one for all."""
    if any(isinstance(x, Tensor) for x in numbers):
        same = [torch.as_tensor(x, dtype=torch.float32, device=device) for x in numbers]
        return torch.stack(same)
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers, dtype=np.float32)
