"""Steps buckets of runs by the rules of their param groups, with the ranks in lock-step."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ds_ext import rules
from ds_ext.distributed import lockstep
from ds_ext.distributed.placement import Placement
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import State, mapped
from ds_ext.optimizer import host_offload, param_checks, sections, state_checks
from ds_ext.optimizer.bucket_step import BucketStep, WeightNorms
from ds_ext.optimizer.ema import GroupRule
from ds_ext.optimizer.nonfinite import GradCheck
from ds_ext.optimizer.param_table import GroupIndex, ParamTable
from ds_ext.optimizer.plans import MAX_PLANS, BucketPlan, are_batched
from ds_ext.optimizer.updates import RunUpdate


class BucketOptimizer(ParamTable):
    """Updates the weights and states of a parameter table, a bucket of runs at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[tuple[object, ...], BucketPlan] = {}  # of the buckets stepped so far
        self.are_all_batched = False  # whether the rules of all groups accept batches
        self._checked_version: object = None  # of the last ``check_param_groups``
        self._norms: WeightNorms = {}  # of weights since the last ``commit_weight_norms``

    def check_param_groups(self) -> list[GroupRule]:
        """Follows edits of ``param_groups``, and checks the hyper-parameters that groups have now.

        Returns:
            The rules of the groups.

        Raises:
            ValueError: a value is not allowed, or a parameter cannot be stepped or is in two
                groups; nothing has been stepped.
            RuntimeError: the model has the averages of its weights.
        """
        self.refuse_exchanged()
        self.follow_groups()
        found = [self.rule_at(i) for i in range(len(self.index.groups))]
        if self.version == self._checked_version:
            return found
        for i, group in enumerate(self.index.groups):
            if sections.are_set(found[i]):
                for p in (p for p in group["params"] if p.requires_grad):
                    param_checks.refuse_shape(self, p, self.shard(p))
        self._checked_version = self.version
        return found

    def follow_groups(self) -> None:
        """Indexes ``param_groups`` again if they were edited since the last call.

        Raises:
            ValueError: as of ``index_parameters``.
        """
        if not self.index.is_of(self.param_groups):
            self.index_parameters()

    def index_parameters(self) -> None:
        """Indexes ``param_groups`` again.

        Raises:
            ValueError: a new parameter cannot be stepped; the index stays as it was.
        """
        before, index = self.index, GroupIndex(self.param_groups, self.numbers)
        new = {p: None for p in index.number_of if p not in before.number_of}
        param_checks.refuse_params(self, new)
        if new:
            param_checks.refuse_shared_memory(index.number_of)
        kinds = {self.hypers_of(group) for group in index.groups}
        self.are_all_batched = all(rules.entry_of(kind).is_batched for kind in kinds)
        self.use_index(index)
        if len(index.number_of) == len(before.number_of):  # accelerate replaces all for FSDP2
            pairs = zip(before.number_of, index.number_of, strict=True)
            now = {p: q for p, q in pairs if p not in index.number_of and q in new}
            self.stacks = {now.get(p, p): first for p, first in self.stacks.items()}
        self._plans.clear()
        if self.update_stats is not None:
            self.update_stats.groups = len(index.groups)
            if any(index.group_index_of.get(p) != i for p, i in before.group_index_of.items()):
                self.update_stats.clear()  # its sums are by groups
        state_checks.make_for_dtensors(self, index.number_of)

    def number_among(self, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]]) -> None:
        """Numbers parameters among all those of a model whose ranks hold different parameters.

        Args:
            names: of this rank's parameters.
            groups: the names of all parameters of each group, the same on all ranks.
        """
        self.names = [list(group) for group in groups]
        numbers = {name: i for i, name in enumerate(itertools.chain(*groups))}
        self.numbers = {param: numbers[names[param]] for param in self.group_of}
        self.index_parameters()

    def update(
        self,
        updates: Iterable[RunUpdate],
        collectives: Placement | None,
        check: GradCheck | None = None,
    ) -> int:
        """Steps runs in lock-step, writing weights and states in place.

        Offloaded runs and states are copied to the device of their gradient for the step. Gradients
        on several devices are stepped device by device, each in separate rounds.

        Args:
            updates: runs, in the same order on all ranks.
            collectives: of the ranks that share the parameters; None if this process holds them
                whole.
            check: which gradients to check during the step. Those that are bad change nothing but
                the step number of their parameter, which ``rollback_step`` corrects. None: all are
                good.

        Returns:
            How many rounds it took.

        Raises:
            ValueError: a hyper-parameter was set to a value that is not allowed.
        """
        if torch.is_grad_enabled():  # it is not in hooks
            with torch.no_grad():
                return self.update(updates, collectives, check)
        rounds, by_device = 0, dict[torch.device, list[RunUpdate]]()
        for u in updates:
            by_device.setdefault(u.g.device, []).append(u)
        for on_device in by_device.values():
            step = self.begin(on_device, check)
            try:
                rounds += lockstep.run(step.generators, collectives)
            except BaseException:  # a program may go on: the step counts as not made
                if self.offload is None:  # otherwise copies of the states have counted it
                    self.rollback_step(u.param for u in on_device)
                raise
            step.end()
        return rounds

    def begin(self, updates: Sequence[RunUpdate], check: GradCheck | None = None) -> BucketStep:
        """Begins the step of runs whose gradients are on one device.

        See ``update`` for ``check``.

        Returns:
            The step. Run its ``generators`` to their end with the other ranks, then call ``end``.
        """
        states: Sequence[State] = [self.state[u.param] for u in updates]
        device = updates[0].g.device
        write_back: Callable[[], None] | None = None
        if self.offload is not None or any(u.p.device != device for u in updates):
            moved = host_offload.on_device_of_gradients(updates, states, self.offload)
            updates, states, write_back = moved
        plan = self._fitting_plan(updates, states, device)
        if plan is None:
            for u, state in zip(updates, states, strict=True):
                if not state:
                    state_checks.make(self, u, state)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[_key(updates)] = BucketPlan(self, updates, states)
        for i in plan.batched:
            states[i]["step"] += 1
        return BucketStep(self, plan, updates, states, write_back, check, self._norms)

    def _fitting_plan(
        self, updates: Sequence[RunUpdate], states: Sequence[State], device: torch.device | None
    ) -> BucketPlan | None:
        """The plan of a bucket; None if it has none that still fits, after checks of its states.

        Moves these states to ``device`` if given. Raises ValueError before a state is made.
        """
        plan = self._plans.get(_key(updates))
        if plan is not None and plan.fits(self, updates, states):
            return plan
        for u, state in zip(updates, states, strict=True):
            state_checks.check(self, u, state, device)
        return None

    def commit_weight_norms(self) -> None:
        """Commits the cached norms of the updated weights.

        Call it after the version counters of published weights were incremented.
        """
        for cache, runs in self._norms.items():
            cache.note(runs)
        self._norms.clear()

    def rollback_step(self, params: Iterable[Tensor]) -> None:
        """Undoes the step counts and statistics of parameters that were not stepped.

        Args:
            params: parameters whose gradients were bad, as ``GradFlags`` reported after the step,
                or of a step that has failed.
        """
        params = list(params)
        for param in params:
            self.state[param]["step"] -= 1
            if not self.state[param]["step"]:
                del self.state[param]
            if self.update_stats is not None and param in self.number_of:
                self.update_stats.discount(self.number_of[param])
        left = {*map(id, params)}
        for key, plan in self._plans.items() if left else ():
            for batch in plan.batches:  # the step has recorded norms of weights it did not write
                cache = batch.norm_cache
                if cache is not None and not left.isdisjoint(key[i] for i in batch.positions):
                    cache.forget()

    def check_states(self, buckets: Iterable[Sequence[RunUpdate]]) -> None:
        """Checks the states of several buckets, before the first one is stepped.

        Raises:
            ValueError: a parameter cannot be stepped, or a state does not fit its parameter.
        """
        for updates in buckets:
            states = [self.state.get(u.param) or {} for u in updates]
            self._fitting_plan(updates, states, None)

    def first_round_checks(self, shards: Mapping[Tensor, Shard]) -> set[Tensor]:
        """Returns the parameters whose gradients the first round can check; equal on all ranks.

        The rules that groups have now reach their first round before they write anything.

        Args:
            shards: parameters that are stepped in batches, and the run of each. Tensor parallelism
                must not have split them.
        """
        return {
            p
            for p, shard in shards.items()
            if p not in self.stacks
            and rules.entry_of(type(rule := self.rule_of(p))).sums_first(rule, shard)
        }

    def in_batches(self, shards: Mapping[Tensor, Shard], device: torch.device) -> set[Tensor]:
        """Returns the parameters that are stepped in batches, the same on all ranks.

        Args:
            shards: the parameters, and the run of each.
            device: of their gradients, whose dtypes must be supported by native code and kernels.
        """
        return {
            p
            for p, shard in shards.items()
            if p.device == device
            and are_batched(self, p, shard, self.rule_of(p), [p.dtype], device)
        }

    def move_states(self, wanted: Callable[[str], bool], move: Callable[[Tensor], Tensor]) -> None:
        """Replaces the state tensors under all wanted keys by ``move`` of each tensor."""
        for state in self.state.values():
            for key in filter(wanted, state):
                state[key] = mapped(state[key], move)
        self._plans.clear()


def _key(updates: Sequence[RunUpdate]) -> tuple[object, ...]:
    """What identifies the plan of a bucket: its parameters, and the device of their gradients."""
    params, *_ = zip(*updates, strict=True)
    return *map(id, params), updates[0].g.device
