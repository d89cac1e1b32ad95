"""Plans: which runs of a bucket are stepped as one batch, and which alone.

Runs form a batch if they have the same param group, dtypes, number of steps and kind of geometry
(``geometry_class``). Experts of stacks form batches of their own. A rule that is registered as
``is_batched`` makes one pass over the whole batch. Other rules, parameters that no batched pass
supports, and rules whose state has another dtype are stepped one by one. All ranks choose the same
batches, because their partial sums are added up in order. This holds if all ranks have devices of
one kind.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import rules
from ds_ext.ops import sixteen_bit, turns
from ds_ext.ops.batch import geometry_class, may_join, stacked
from ds_ext.ops.executors import tables
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.executors.triton import devices
from ds_ext.ops.runs import Layout, Runs
from ds_ext.ops.schema import DTYPES
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, leaves
from ds_ext.optimizer import ema, expert_stacks, nonfinite, sections
from ds_ext.optimizer.ema import GroupRule
from ds_ext.optimizer.param_table import ParamTable
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import State

MAX_PLANS = 4096  # more occur only if each step forms different buckets
# Of the state tensors that tables read: None is fp32, the others are codes and scales of 8 bits.
STATE_DTYPES = {None, torch.float32, torch.int8, torch.uint8, torch.int16}


class BatchItem(NamedTuple):
    """One matrix or vector of a batch: a parameter's run, or the run of one expert."""

    position: int  # of the parameter's run in the bucket
    shard: Shard
    number: int  # of the parameter
    first: int  # number of the run's first element in the parameter
    run: slice | None = None  # where an expert lies in the parameter's run; None: all of it
    expert: str = ""

    def of(self, run: Tensor) -> Tensor:
        """Returns the piece's elements of a parameter's run."""
        return run if self.run is None else run[self.run]

    def state(self, state: State) -> State:
        """Returns the piece's part of a parameter's state, and of its master if there is one."""
        if self.run is None:
            return state
        own = state[expert_stacks.EXPERTS][self.expert]
        return {**own, "master": state["master"][self.run]} if "master" in state else own


class BatchPlan:
    """Pieces that are stepped as one batch, by the rule of one param group.

    The states of the bucket were checked.

    Attributes:
        positions: the position in the bucket of each piece's parameter.
    """

    def __init__(
        self,
        group_index: int,
        pieces: Sequence[BatchItem],
        rule: GroupRule,
        dtype: torch.dtype,
        states: Sequence[State],
        device: torch.device,
    ) -> None:
        self.group_index, self.pieces, self.device = group_index, pieces, device
        self.positions = [x.position for x in pieces]
        shard = pieces[0].shard
        self.parts: Parts = rule.state_spec(shard)
        if (rule.weight_update, dtype) in sixteen_bit.MASTER_DTYPES:
            self.parts = {**self.parts, "master": Part.like(shard)}
        self.batch = TableBatch([x.shard for x in pieces], [x.first for x in pieces], device)
        self.param_ids = np.array([x.number for x in pieces], dtype=np.uint32)
        numel = np.array([x.shard.numel for x in pieces], dtype=np.float32)
        # The largest allowed sums of squares of gradients, [n].
        self.upper_bounds: NDArray[np.float32] = nonfinite.upper_bound(numel, torch.float32)
        # Rules whose updates are in proportion to the weights read the norm of these.
        reads_norm = rules.entry_of(type(rule)).is_relative(rule)
        self.norm_cache = self.batch.passes.new_norm_cache() if reads_norm else None
        self._are_whole = all(x.run is None for x in pieces)
        self._state: State | None = None  # of the step in progress
        own = [states[i] for i in self.positions]
        self._layouts = _layouts(self.state(own))
        assert None not in self._layouts, "a batch of states that were not checked"

    def fits(self, states: Sequence[State]) -> bool:
        """Returns whether states have the layouts of those that were checked, and equal steps.

        Passes read and write as many elements as the layouts have; addresses may differ.
        """
        self._state = None  # left by a step that raised an error
        own = [states[i] for i in self.positions]
        try:
            state, step = self.state(own), own[0]["step"]
            for s in own:
                if s["step"] != step:
                    return False
        except (KeyError, AttributeError, TypeError):  # something else was put there
            return False
        if _layouts(state) != self._layouts:
            return False
        self._state = state
        return True

    def state(self, states: Sequence[State]) -> State:
        """Returns the states of the pieces' parameters as one state of the batch."""
        state, self._state = self._state, None
        if state is not None:
            return state
        if not self._are_whole:
            states = [x.state(s) for x, s in zip(self.pieces, states, strict=True)]
        return stacked(states, self.parts)

    def runs(self, runs: Sequence[Tensor]) -> Runs:
        """Returns each piece's elements of the runs of the pieces' parameters."""
        if not self._are_whole:
            runs = [x.of(run) for x, run in zip(self.pieces, runs, strict=True)]
        return Runs(runs, Layout(runs[0].dtype, self.device, self.batch.run_sizes))


def _layouts(state: State) -> list[object]:
    """What a step relies on of the runs or tensors in a state, which is nested in dicts."""
    found: list[object] = []
    for key, x in state.items():
        if isinstance(x, dict):
            found += [key, *_layouts(x)]
        elif isinstance(x, Runs):
            found.append(x.layout)
        elif isinstance(x, Tensor):
            found.append((key, type(x), x.dtype, x.shape, x.device, x.is_contiguous()))
        else:  # the number of steps
            found.append((key, type(x), isinstance(x, int) and x >= 0))
    return found


class BucketPlan:
    """Divides the runs of a bucket into batches, and runs that are stepped alone.

    The states of the runs were checked.

    Attributes:
        alone, batched: positions of the runs that are stepped alone, and in batches.
        turned: the shards of the runs that are stepped alone, with their turns.
        rules: the rules of the bucket's param groups by position, as of the last ``fits``.
        uses_kernels: whether batches are stepped on a GPU.
        memory_sizes: the largest sizes of ``Memory`` that steps of the bucket have used.
    """

    def __init__(
        self, table: ParamTable, updates: Sequence[RunUpdate], states: Sequence[State]
    ) -> None:
        self.properties = _properties(updates)
        device = updates[0].g.device
        self.alone: list[int] = []
        self.batched: list[int] = []
        found: dict[tuple[Any, ...], list[BatchItem]] = {}
        groups = {table.group_index_of[u.param] for u in updates}
        self.rules = rule_of = {i: table.rule_at(i) for i in groups}
        self.version = table.version
        for i, (u, state) in enumerate(zip(updates, states, strict=True)):
            dtypes, group = (u.p.dtype, u.g.dtype), table.group_index_of[u.param]
            rule = rule_of[group]
            pieces: list[BatchItem] = []
            if are_batched(table, u.param, u.shard, rule, dtypes, device):
                is_flat = rules.entry_of(type(rule)).is_flat and u.shard.split is None
                pieces = _pieces(table, i, u, state, is_flat)
            if not pieces:
                self.alone.append(i)
                continue
            self.batched.append(i)
            sixteen_bit.prepare(u.p, state, rule)
            is_stack = u.param in table.stacks  # its gradient is checked as a whole
            in_round = not is_stack and rules.entry_of(type(rule)).sums_first(rule, u.shard)
            common = group, u.p.dtype, u.g.dtype, is_stack, in_round, state["step"]
            for piece in pieces:
                found.setdefault((*common, *geometry_class(piece.shard)), []).append(piece)
        self.batches = [
            BatchPlan(i, pieces, rule_of[i], dtype, states, device)
            for (i, dtype, *_), pieces in found.items()
        ]
        self.uses_kernels = bool(self.batches) and devices.supports(device)
        self.turned = [u.shard for u in with_turns(table, [updates[i] for i in self.alone])]
        self.memory_sizes = [0, 0, 0]
        self._layouts_alone = [_layouts(states[i]) for i in self.alone]

    def fits(
        self, table: ParamTable, updates: Sequence[RunUpdate], states: Sequence[State]
    ) -> bool:
        """Returns whether the plan still holds for runs of the same parameters."""
        for i in self.rules:
            self.rules[i] = table.rule_at(i)
        if table.version != self.version or _properties(updates) != self.properties:
            return False
        for i, layout in zip(self.alone, self._layouts_alone, strict=True):
            if _layouts(states[i]) != layout:
                return False
        for batch in self.batches:
            if not batch.fits(states):
                return False
        return True


def _properties(updates: Sequence[RunUpdate]) -> list[tuple[object, ...]]:
    """The properties of runs that a plan depends on."""
    return [(shard, p.dtype, g.dtype, p.numel(), g.numel()) for _, p, g, shard, _ in updates]


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


def are_batched(
    table: ParamTable,
    param: Tensor,
    shard: Shard,
    rule: GroupRule,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> bool:
    """Returns whether a run is stepped in a batch; the same on all ranks.

    ``dtypes`` are those of weight and gradient; the gradient is on ``device``.
    """
    if not may_join(shard) or not all(dtype in DTYPES for dtype in dtypes):
        return False
    if not tables.supports(device):
        return False
    if sections.are_set(rule) or ema.needs_own_step(rule, dtypes[0]):
        return False
    shards = [shard]
    if table.stacks and param in table.stacks:
        shards = [own for _, own in expert_stacks.split(shard)]
    entry, is_gpu = rules.entry_of(type(rule)), devices.supports(device)
    for own in shards:
        if is_gpu and not devices.supports_matrices(own) or not entry.batches(rule, own):
            return False
        parts = leaves(rule.state_spec(own))  # averages of weights have forms of their own
        if any(part.dtype not in STATE_DTYPES for keys, part in parts if keys != (ema.EMA,)):
            return False
    return True


def _pieces(
    table: ParamTable, position: int, u: RunUpdate, state: State, is_flat: bool
) -> list[BatchItem]:
    """The pieces of the run at ``position``: one, as a vector or not, or one for each expert."""
    number, start = table.number_of[u.param], u.shard.start
    if u.param not in table.stacks:
        return [BatchItem(position, u.shard.flat if is_flat else u.shard, number, start)]
    first = table.elements_before(u.param, u.shard) + start
    found = zip(state[expert_stacks.EXPERTS], expert_stacks.split(u.shard), strict=True)
    return [
        BatchItem(position, shard, number, first + run.start, run, expert)
        for expert, (run, shard) in found
    ]
