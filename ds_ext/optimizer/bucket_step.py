"""The step of a bucket: batches of runs, and runs that are stepped alone."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import ops, rules
from ds_ext.distributed.lockstep import Generators, StepGenerator
from ds_ext.ops import sixteen_bit, turns
from ds_ext.ops.executors.tables import AnyNormCache
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.runs import Runs
from ds_ext.optimizer import ema, expert_stacks, nonfinite, sections, state_checks
from ds_ext.optimizer.nonfinite import GradCheck
from ds_ext.optimizer.param_table import ParamTable
from ds_ext.optimizer.plans import BatchPlan, BucketPlan
from ds_ext.optimizer.update_stats import MeasuredWeight
from ds_ext.optimizer.updates import ProjectedGrads, RunUpdate, StagedBucket
from ds_ext.rules import State

WeightNorms = dict[AnyNormCache, Runs]  # by cache of weight norms: the weights


class BatchedStep:
    """The step of some runs of a bucket, as one batch."""

    def __init__(
        self,
        table: ParamTable,
        plan: BatchPlan,
        rule: Any,
        updates: Sequence[RunUpdate],
        states: Sequence[State],
    ) -> None:
        self.stats, self.updates, self.states = table.update_stats, updates, states
        self.rule = rule
        self.t = states[plan.pieces[0].position]["step"]
        self.sums_first = rules.entry_of(type(rule)).sums_first(rule, plan.pieces[0].shard)
        self._set_plan(plan)

    def _set_plan(self, plan: BatchPlan) -> None:
        """Collects the tensors of the batch."""
        self.plan, self.batch, self.upper_bounds = plan, plan.batch, plan.upper_bounds
        self.params = [self.updates[piece.position].param for piece in plan.pieces]
        self.state = plan.state(self.states)
        first = plan.pieces[0].position
        self.runs = plan.runs([u.p for u in self.updates], self.updates[first].p.dtype)
        self.masters = None
        if "master" in self.states[first]:
            dtype = self.states[first]["master"].dtype
            self.masters = plan.runs([s.get("master") for s in self.states], dtype)
        self.gradients = _gradients(plan, self.updates)
        self.sums: list[Tensor] = []  # of the update statistics, for each piece
        self.totals: Tensor | None = None  # [2 n], on a GPU what to add to them

    def begin(self) -> StepGenerator:
        """Returns the generator of the rule, which steps all parameters of the batch."""
        cache = self.plan.norm_cache
        if cache is not None:
            cache.check(self.runs)
        numbers = self.plan.param_ids
        p = sixteen_bit.weights(self.runs, self.masters, self.rule, numbers, self.t, cache)
        if self.stats is not None:
            group = self.plan.group_index
            self.sums = [
                self.stats.sums_of(x.number, group, run, self.updates[x.position].num_replicas)
                for run, x in zip(self.runs.tensors, self.plan.pieces, strict=True)
            ]
            p = replace(p, update_sums=self._update_sums())
        passes = self.batch.passes
        passes.gradients, passes.square_parts = self.gradients, None
        step = self.rule.step(p, self.gradients, self.state, self.t, self.batch)
        e = ema.average(self.state, self.rule, self.plan.param_ids, self.t)
        passes.begin(p, self.gradients, self.state)
        return ema.averaged(step, self.rule, p, e, self.t, self.batch)

    def _update_sums(self) -> Runs:
        """Where passes write two sums of each parameter: the statistics, or ``totals`` on a GPU."""
        if not devices.supports(self.batch.device):
            return Runs(self.sums)
        n = len(self.sums)
        self.totals = torch.zeros(2 * n, dtype=torch.float32, device=self.batch.device)
        return Runs((self.totals,), firsts=2 * np.arange(n))

    def squares(self) -> Tensor:
        """Returns the sums of squares of gradients, [n].

        It takes no pass if the rule has added them up already.
        """
        g = self.gradients
        known = self.batch.passes.added_up()
        return ops.square_sum(g, self.batch, g) if known is None else known

    def retain(self, good: NDArray[np.bool_]) -> bool:
        """Rolls the step back and keeps only ``good`` parameters; returns whether some are left."""
        if self.stats is not None:  # the next ``begin`` counts the good ones again
            for piece in self.plan.pieces:
                self.stats.discount(piece.number)
        pieces = list(zip(self.plan.pieces, good, strict=True))
        for piece, is_good in pieces:
            if not is_good:
                rollback(self.states[piece.position])
        remaining = [piece for piece, is_good in pieces if is_good]
        self.batch.passes.detach()  # the plan outlives the step, and would hold its gradients
        if remaining:
            plan = self.plan
            self._set_plan(
                BatchPlan(plan.group_index, remaining, self.rule, self.states, plan.device)
            )
        else:
            self.runs = Runs([])
        return bool(remaining)

    def end(self, norms: WeightNorms) -> None:
        """Increments the weights' version counters, and adds the caches of their norms."""
        if self.totals is not None:
            alike: dict[int, list[int]] = {}
            for i, sums in enumerate(self.sums):
                alike.setdefault(id(sums), []).append(i)
            totals = self.totals.view(-1, 2).double()
            for some in alike.values():
                self.sums[some[0]] += torch.stack([totals[i] for i in some]).sum(0)
        for run in self.runs.tensors:
            torch.autograd.graph.increment_version(run)
        if self.plan.norm_cache is not None:
            norms[self.plan.norm_cache] = self.runs


class BucketStep:
    """The step of a bucket's runs.

    Args:
        table: the table of the optimizer.
        staged: the runs.
        plan: which runs form batches; None: all are stepped alone.
        check: how to check their gradients.
        norms: caches of the norms of stepped weights, which ``end`` adds.

    Attributes:
        generators: of partial sums, in the same order on all ranks.
    """

    def __init__(
        self,
        table: ParamTable,
        staged: StagedBucket,
        plan: BucketPlan | None,
        check: GradCheck,
        norms: WeightNorms,
    ) -> None:
        self.table, self.staged, self.check, self.norms = table, staged, check, norms
        updates, states = staged.updates, staged.states
        alone = range(len(updates)) if plan is None else plan.alone
        self.alone = with_turns(table, [updates[i] for i in alone])
        self.alone_states = [states[i] for i in alone]
        self.batches: list[BatchedStep] = []
        self.plan, self.memory = plan, _memory(plan, updates)
        if plan is not None:
            for batch in plan.batches:
                _prepare_masters(plan.rules[batch.group_index], batch.positions, updates, states)
            self.batches = [
                BatchedStep(table, x, plan.rules[x.group_index], updates, states)
                for x in plan.batches
            ]
        self.generators: list[StepGenerator] = []
        if self.memory is not None:
            self.generators = Generators(self.memory.contiguous_span)
        self.generators += [self._checked(batch) for batch in self.batches]
        for u, state in zip(self.alone, self.alone_states, strict=True):
            assert u.param not in check.params, "rounds check only gradients of batches"
            self.generators += begin_rules(table, u, state)

    def _checked(self, step: BatchedStep) -> StepGenerator:
        """The generator of a step, with a check of its gradients if ``check`` contains them."""
        params, votes = self.check.params, self.check.votes
        modes = {(False, False)}
        if params or votes:
            modes = {(p in params, bool(votes) and p in votes) for p in step.params}
        assert len(modes) == 1, "the gradients of a batch are all checked in the same way"
        if self.memory is not None:
            return nonfinite.checked_on_device(step, self.memory, self.check)
        ((by_sums, _),) = modes
        return nonfinite.checked_on_host(step, self.check) if by_sums else step.begin()

    def end(self) -> None:
        """Stores weights and states, after the rules have ended."""
        for batch in self.batches:
            batch.end(self.norms)
            batch.batch.passes.detach()
        bad, state = self.check.bad, self.table.state
        self.staged.write_back(bad)
        for param in bad:
            if param in state and not state[param]:
                del state[param]
        if self.plan is not None and self.memory is not None:
            self.plan.memory_sizes = [*map(max, self.plan.memory_sizes, self.memory.used)]


def _prepare_masters(
    rule: Any, positions: Sequence[int], updates: Sequence[RunUpdate], states: Sequence[State]
) -> None:
    """Creates, drops or converts the masters of a batch, if the rule needs others now."""
    needed = sixteen_bit.MASTER_DTYPES.get((rule.weight_update, updates[positions[0]].p.dtype))
    for i in positions:
        master = states[i].get("master")
        if (master if master is None else master.dtype) != needed:
            sixteen_bit.prepare(updates[i].p, states[i], rule)


def with_turns(table: ParamTable, updates: Sequence[RunUpdate]) -> list[RunUpdate]:
    """Returns runs with their turns set, so that all ranks get shared work of similar cost."""
    if not any(u.shard.is_cut for u in updates):
        return [*updates]
    params = tuple(_sharing(table, u) for u in updates)
    if not any(param.works for param in params):
        return [*updates]
    chosen = zip(updates, turns.balanced(params), strict=True)
    return [u._replace(shard=replace(u.shard, turn=turn)) for u, turn in chosen]


def _sharing(table: ParamTable, u: RunUpdate) -> turns.SharedParam:
    """The work on a parameter that one rank does for all; of a stack, that on its first expert."""
    rule, shard, works = table.rule_of(u.param), u.shard, list[turns.SharedWork]()
    cost = rules.entry_of(type(rule)).shared_work
    if cost is not None and u.param in table.stacks and shard.numel:
        shard = expert_stacks.split(shard)[0][1]  # each expert has ranks of its own
    if cost is not None and shard.is_cut:
        for i, section in enumerate(sections.of(rule, shard.shape)):
            own, first = section.shard(shard), bisect(shard.starts, section.first) - 1
            works.append(turns.SharedWork(cost(rule, own), len(own.starts), first, i))
        works = works or [turns.SharedWork(cost(rule, shard), len(shard.starts))]
    return turns.SharedParam(u.shard.turn, len(shard.starts), tuple(works))


def begin_rules(table: ParamTable, u: RunUpdate, state: State | None = None) -> list[StepGenerator]:
    """Begins a parameter's step: counts it in the state, which is made if there is none.

    Args:
        table: the table of the optimizer.
        u: the run to step.
        state: the run's state, if it is a copy of that in ``table.state``; written in place.

    Returns:
        The generators to run to their end: one, or one for each expert and section.
    """
    state = table.state[u.param] if state is None else state
    rule = table.rule_of(u.param)
    if not state:
        state_checks.make(table, u, state)
    state["step"] += 1
    t, number = state["step"], table.number_of[u.param]
    before = table.elements_before(u.param, u.shard)
    p = sixteen_bit.weight(u.p, state, rule, number, u.shard, before)

    def measured(p: sixteen_bit.Weight) -> ops.Writable:
        """A weight, wrapped if updates are measured."""
        if table.update_stats is None:
            return p
        run = p if isinstance(p, Tensor) else p.run
        squares = table.update_stats.sums_of(number, group_index, run, u.num_replicas)
        return MeasuredWeight(p, squares)

    group_index = table.group_index_of[u.param]
    first = before + u.shard.start
    begun = []
    for i, (run, shard, s) in enumerate(expert_stacks.matrices(u.shard, state)):
        own = sixteen_bit.part(p, run)
        g = u.g.parts[i] if isinstance(u.g, ProjectedGrads) else expert_stacks.part(u.g, run)
        e = ema.average(s, rule, number, t, first + run.start)
        begun += sections.steps(rule, own, g, s, t, shard, measured, e)
    return begun


def _memory(plan: BucketPlan | None, updates: Sequence[RunUpdate]) -> Memory | None:
    """The memory of a bucket's launches on a GPU; None elsewhere."""
    device = updates[0].g.device if updates else None
    if plan is None or device is None or not devices.supports(device):
        return None
    return Memory(device, plan.memory_sizes)


def rollback(state: State) -> None:
    """Undoes the count of a step that has written nothing else to ``state``."""
    state["step"] -= 1
    if not state["step"]:
        state.clear()


def _gradients(plan: BatchPlan, updates: Sequence[RunUpdate]) -> Any:
    """The gradients of a batch: runs, or runs with a factor each and a common bound.

    Factors differ under tensor parallelism: parameters that it replicates have another divisor.
    """
    given: list[Any] = [u.g for u in updates]  # also of parameters that are stepped alone
    found = [given[piece.position] for piece in plan.pieces]
    dtype = found[0].dtype
    if ops.Scaled not in {*map(type, found)}:
        return plan.runs(given, dtype)
    runs = plan.runs([g.x if isinstance(g, ops.Scaled) else g for g in given], dtype)
    scaled = [g for g in found if not isinstance(g, Tensor)]
    if not scaled:
        return runs
    factors = [1.0 if isinstance(g, Tensor) else g.factor for g in found]
    factor = _vector(factors, plan.device)
    return ops.Scaled(cast(Tensor, runs), factor, scaled[-1].bound)


def _vector(numbers: Sequence[Any], device: torch.device) -> Any:
    """One number per parameter, [n], or a single number if all are equal; some may be tensors."""
    if any(isinstance(x, Tensor) for x in numbers):
        same = [torch.as_tensor(x, dtype=torch.float32, device=device) for x in numbers]
        return torch.stack(same)
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers, dtype=np.float32)
