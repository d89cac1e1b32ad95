"""The step of a bucket: of its batches, and of the runs that are stepped alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.ops import batched, weight_update
from ds_ext.ops.batch import Flat, Known, Runs
from ds_ext.ops.shard import Shard
from ds_ext.ops.triton import devices, launches, memory
from ds_ext.ops.triton.memory import Memory
from ds_ext.optimizer import on_device, verdict
from ds_ext.optimizer.plans import Group, Plan, State

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer
    from ds_ext.optimizer.run_updates import RunUpdate, StagedRun


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
        self.kept = group.kept(self.of)
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
        step: lockstep.Rule = self.rule.step(p, self.gradients, self.kept, self.t, self.batch)
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
            self._take(Group(self.group.row, remaining, self.group.parts, self.runs.device))
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
            rules = {i: optimizer.rule_at(i) for i in {*plan.rows}}
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
            votes = self.judge.votes if by_votes else {}
            return on_device.judged(step, self.memory, votes, by_sums, self.judge.told)
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


def take_back(state: State) -> None:
    """Makes a state that of a step before, to which nothing but the number of steps was written."""
    state["step"] -= 1
    if not state["step"]:
        state.clear()


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
