"""The step of a bucket: batches of runs, and runs that are stepped alone."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import ops, rules
from ds_ext.distributed.lockstep import StepGenerator, advance
from ds_ext.ops import sixteen_bit
from ds_ext.ops.executors.native.native_table import NormCache
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.functions import Geometry
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import ema, expert_stacks, nonfinite, sections
from ds_ext.optimizer.ema import GroupRule
from ds_ext.optimizer.nonfinite import GradCheck
from ds_ext.optimizer.param_table import ParamTable
from ds_ext.optimizer.plans import BatchPlan, BucketPlan
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import State

WeightNorms = dict[NormCache, Runs]  # by cache of weight norms: the weights


class BatchedStep:
    """The step of some runs of a bucket, as one batch.

    ``measure`` is called before weights are written.
    """

    def __init__(
        self,
        measure: Callable[[Sequence[RunUpdate], object, Geometry], None],
        plan: BatchPlan,
        rule: GroupRule,
        updates: Sequence[RunUpdate],
        states: Sequence[State],
    ) -> None:
        self.measure, self.rule, self.plan, self.batch = measure, rule, plan, plan.batch
        self.updates = [updates[i] for i in plan.positions]  # of the pieces' parameters
        self.states = [states[i] for i in plan.positions]
        self.params, runs, grads, *_ = map(list, zip(*self.updates, strict=True))
        self.t, self.state = self.states[0]["step"], plan.state(self.states)
        self.runs = plan.runs(runs)
        self.gradients = _gradients(plan, grads)
        # What passes check: numbers, their limits, and whether they are sums of squares.
        self.flags: list[tuple[Tensor, NDArray[np.float32], bool]] = []

    def begin(self) -> StepGenerator:
        """Returns the generator of the rule, which steps all parameters of the batch."""
        plan, rule, t = self.plan, self.rule, self.t
        if plan.norm_cache is not None:
            plan.norm_cache.check(self.runs)
        masters = self.state.get("master")
        p = sixteen_bit.weights(self.runs, masters, rule, plan.param_ids, t, plan.norm_cache)
        passes = self.batch.passes
        passes.gradients, passes.square_parts = self.gradients, None
        # A batch replaces the shard, and its weights those of a run.
        step = rule.step(p, self.gradients, self.state, t, self.batch)  # type: ignore[arg-type]
        passes.begin(p, self.gradients)
        self.measure(self.updates, p, self.batch)
        if not rule.ema_decay:
            return step
        e = ema.average(self.state, rule, plan.param_ids, t)
        return ema.averaged(step, rule, p, e, t, self.batch)

    def squares(self) -> Tensor:
        """Returns the sums of squares of gradients, [n].

        It takes no pass if the rule has added them up already.
        """
        g = self.gradients
        known = self.batch.passes.added_up()
        return ops.square_sum(g, self.batch, g) if known is None else known

    def checked(self, memory: Memory | None, check: GradCheck) -> StepGenerator:
        """Yields the rounds. Passes skip parameters with bad gradients.

        ``memory`` is that of the bucket's launches; None on a CPU.
        """
        by_sums, by_votes = check.ways(self.params)
        self.batch.passes.arrays.memory = memory
        rule = self.begin()
        if by_votes:
            votes = torch.stack([check.votes[param].view(()) for param in self.params])
            most = np.full(len(votes), nonfinite.MAX_GOOD_VOTES, dtype=np.float32)
            self.flags.append((votes, most, False))
            self.batch.passes.skip_bad(votes, most)
        sums = advance(rule, None)
        if by_sums:
            *totals, found = yield (*(sums or ()), self.squares())
            self.flags.append((found.clone(), self.plan.upper_bounds, True))
            self.batch.passes.skip_bad(found, self.plan.upper_bounds)
            sums = advance(rule, tuple(totals))
        while sums is not None:
            sums = advance(rule, (yield sums))

    def end(self, norms: WeightNorms) -> None:
        """Increments the weights' version counters, and adds the caches of their norms."""
        for run in self.runs.tensors:
            torch.autograd.graph.increment_version(run)
        if self.plan.norm_cache is not None:
            norms[self.plan.norm_cache] = self.runs
        self.batch.passes.detach()  # the plan outlives the step, and would hold its gradients


class BucketStep:
    """The step of a bucket's runs, on the device of their gradients.

    If weights and states are copies, ``write_back`` stores them. Without ``check``, all gradients
    are good. ``end`` adds caches of the norms of stepped weights to ``norms``.

    Attributes:
        generators: of partial sums, in the same order on all ranks.
    """

    def __init__(
        self,
        table: ParamTable,
        plan: BucketPlan,
        updates: Sequence[RunUpdate],
        states: Sequence[State],
        write_back: Callable[[], None] | None,
        check: GradCheck | None,
        norms: WeightNorms,
    ) -> None:
        self.table, self.plan, self.write_back = table, plan, write_back
        self.check, self.norms = check, norms
        self.batches: list[BatchedStep] = []
        self.memory: Memory | None = None
        self.generators: list[StepGenerator] = []
        self.measured: list[Callable[[], None]] = []  # what ``UpdateStats.begin`` has returned
        measure = functools.partial(_measure, table, self.measured)  # not a method: no cycle
        if plan.uses_kernels:
            self.memory = Memory(updates[0].g.device, plan.memory_sizes)
        for x in plan.batches:
            step = BatchedStep(measure, x, plan.rules[x.group_index], updates, states)
            self.batches.append(step)
            if self.memory is None and check is None:
                self.generators.append(step.begin())
            else:
                self.generators.append(step.checked(self.memory, check or GradCheck()))
        for i, shard in zip(plan.alone, plan.turned, strict=True):
            u = updates[i]._replace(shard=shard)
            assert check is None or not any(check.ways([u.param])), "passes check only batches"
            rule = plan.rules[table.group_index_of[u.param]]
            if table.update_stats is not None:
                p = sixteen_bit.weight(u.p, states[i], rule, 0, u.shard)  # to be read
                measure([u], p, Shard.whole(u.p.shape))
            self.generators += begin_rules(table, u, states[i], rule)

    def end(self) -> None:
        """Stores weights, states and flags of gradients, after the rules have ended."""
        for add_squares in self.measured:
            add_squares()
        for batch in self.batches:
            for found in batch.flags:  # a step that fails has no flags: it is undone as a whole
                assert self.check is not None
                self.check.flags.add(batch.params, *found)
            batch.end(self.norms)
        if self.write_back is not None:
            self.write_back()
        if self.memory is not None:
            self.plan.memory_sizes = [*map(max, self.plan.memory_sizes, self.memory.used)]


def _measure(
    table: ParamTable,
    measured: list[Callable[[], None]],
    updates: Sequence[RunUpdate],
    p: object,
    shard: Geometry,
) -> None:
    """Copies the weights ``p`` of some updates before their step, if updates are measured."""
    if table.update_stats is None:
        return
    numbers, groups = table.number_of, table.group_index_of
    keys = [(numbers[u.param], groups[u.param], u.num_replicas) for u in updates]
    measured.append(table.update_stats.begin(p, shard, keys))


def begin_rules(
    table: ParamTable, u: RunUpdate, state: State, rule: GroupRule
) -> list[StepGenerator]:
    """Begins a parameter's step, and counts it in the state.

    ``state`` may be a copy of that in ``table.state``; it is written in place.

    Returns:
        The generators to run to their end: one, or one for each expert and section.
    """
    state["step"] += 1
    t, number = state["step"], table.number_of[u.param]
    before = table.elements_before(u.param, u.shard)
    p = sixteen_bit.weight(u.p, state, rule, number, u.shard, before)
    first = before + u.shard.start
    begun = []
    for run, shard, s in expert_stacks.matrices(u.shard, state):
        own = sixteen_bit.part(p, run)
        g = expert_stacks.part(u.g, run)
        if isinstance(g, Tensor) and not rules.entry_of(type(rule)).is_own:
            g = ops.Scaled(g)  # torch operations on it raise an error here too
        e = ema.average(s, rule, number, t, first + run.start)
        begun += sections.steps(rule, own, g, s, t, shard, e)
    return begun


def _gradients(plan: BatchPlan, grads: list[Any]) -> Any:
    """The gradients of a batch: runs, or runs with a factor each and a common bound.

    Factors differ under tensor parallelism: parameters that it replicates have another divisor.
    """
    if ops.Scaled not in {*map(type, grads)}:
        return plan.runs(grads)
    runs, factors, bound = [], [], None
    for g in grads:
        is_scaled = isinstance(g, ops.Scaled)
        runs.append(g.x if is_scaled else g)
        factors.append(g.factor if is_scaled else 1.0)
        bound = g.bound if is_scaled else bound
    factor: Any = factors[0]
    if not {*map(type, factors)} <= {float, int}:  # some are tensors
        same = [torch.as_tensor(x, dtype=torch.float32, device=plan.device) for x in factors]
        factor = torch.stack(same)
    elif len(set(factors)) > 1:
        factor = np.array(factors, dtype=np.float32)
    return ops.Scaled(cast(Tensor, plan.runs(runs)), factor, bound)
