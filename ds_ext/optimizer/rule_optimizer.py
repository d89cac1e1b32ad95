"""torch.optim.Optimizer around a rule: param groups, state, and a plain ``step()``."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_ext import hyperparams, ops, rules
from ds_ext.distributed import lockstep
from ds_ext.distributed.layout import Layout
from ds_ext.ops import weight_update
from ds_ext.ops.batch import Known, Runs
from ds_ext.ops.native import table
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.ops.triton import devices
from ds_ext.optimizer import (
    expert_stacks,
    fitting,
    host_offload,
    param_groups,
    plain_step,
    spread_state,
    unfit,
)
from ds_ext.optimizer.batches import BucketStep, take_back
from ds_ext.optimizer.group_rules import GroupRules, hypers_of
from ds_ext.optimizer.index import Index, ParamGroup
from ds_ext.optimizer.meter import Meter
from ds_ext.optimizer.model_view import ModelView
from ds_ext.optimizer.plans import Plans, are_batched
from ds_ext.optimizer.run_updates import RunUpdate, StagedRun, by_device
from ds_ext.optimizer.verdict import Trials, Verdict
from ds_ext.rules import Rule

CPU = torch.device("cpu")
# What a copy of an optimizer keeps, beside what torch's Optimizer does.
_KEPT = ("meter", "stacks", "offload", "numbers", "names")


class RuleOptimizer(torch.optim.Optimizer):
    """Steps every parameter by ``rule``.

    Args:
        params: parameters, or groups of them with hyper-parameters of their own.
        **hypers: the fields of the rule's dataclass, and those of ``weight_update.Writing``, which
            say how weights are rounded.

    Raises:
        ValueError: a hyper-parameter is unknown, or has a value that it may not have.

    Attributes:
        meter: if it is set, sums up the sizes of updates and weights: 5 to 30 % of a step's time
            on a CPU, more for bf16 rounded to nearest.
        offload: where states lie between steps; None: on the device of their parameter.
        written: what is known of weights that were written, until ``settle`` is called.
        stacks: the parameters whose first dimension counts experts, each stepped as a parameter of
            its own; and the number of their first expert.
        whereabouts: of parameters that are DTensors.
        index: the group and number of each parameter, as of the last step or edit that was seen.
        numbers, names: of ``number_among``.
    """

    rule: ClassVar[type[rules.Rule]]
    fused: Layout | None = None  # of the model that is stepped inside backward, if it is
    end_backward: Callable[[], None] | None = None  # ends such a step, of ``fuse_into_backward``
    hypers: ClassVar[type]  # the rule, with the fields of ``weight_update.Writing`` after its own

    def __init_subclass__(cls) -> None:
        cls.hypers = hypers_of(cls.rule)
        params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        hypers = inspect.signature(cls.hypers).parameters.values()
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [params, *(h.replace(kind=inspect.Parameter.KEYWORD_ONLY) for h in hypers)]
        )

    def __init__(self, params: Iterable[Any], **hypers: Any) -> None:
        self._reset()
        super().__init__(params, self.check(hypers))

    def _reset(self) -> None:
        """Makes all attributes those of an optimizer without parameters."""
        self.meter: Meter | None = None
        self.stacks: dict[Tensor, int] = {}
        self.offload: host_offload.HostOffload | None = None
        self.index = Index([], {})
        self.numbers: dict[Tensor, int] = {}
        self.names: list[list[str]] = []
        self._rules = GroupRules(self.rule)
        self._plans = Plans()
        self._trials = Trials()
        self._has_batched_rule = False
        self._is_native: bool | None = None
        self.whereabouts = plain_step.Whereabouts()
        self.written: dict[Known, Runs] = {}

    @classmethod
    def for_model(cls, module: nn.Module, **params: Any) -> "RuleOptimizer":
        """Returns the optimizer of a model's trained parameters, as an engine makes it of a config.

        Args:
            module: the model.
            **params: "params" of the config's section "optimizer": hyper-parameters, and
                ``param_groups``, ``target_modules`` and ``others`` (docs/settings.md).

        Raises:
            ValueError: a key is unknown or its value wrong; or ZeRO-3 has cut the model already.
        """
        trained = [p for p in module.parameters() if p.requires_grad]
        if any(p.numel() == 0 for p in trained):
            raise ValueError(
                f"{cls.__name__}.for_model: some trained parameters are empty, as ZeRO-3 leaves "
                "them, so that it cannot be told which are matrices. Name the optimizer in the "
                "config of deepspeed.initialize instead, or make it before the model is cut."
            )
        entry = rules.named(cls.rule.__name__)
        made = param_groups.of_config(entry, params, ModelView(module), trained, "")
        return cls(made.groups, **made.hypers).separate_experts(module)

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all hyper-parameters, the given ones checked, the others at their defaults.

        Raises:
            ValueError: as of ``hyperparams.check``.
        """
        return hyperparams.check(cls.hypers, given, "")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; see torch.optim.Optimizer.

        Args:
            param_group: "params", hyper-parameters that differ from the optimizer's, a "name"; a
                "type", if another rule is to step them, which then has its own defaults but for
                lr, weight_decay, weight_update and seed. Other keys are kept for whoever reads
                them, such as timm's "lr_scale".

        Raises:
            TypeError: it is no dict, or its parameters are no tensors.
            ValueError: a hyper-parameter is wrong, a key looks like a misspelt one, or a parameter
                cannot be stepped.
        """
        if isinstance(param_group, dict):
            param_group = self._rules.complete(param_group, self.defaults)
        super().add_param_group(param_group)
        for name in self.defaults.keys() - {*hyperparams.names(self.hypers_of(param_group))}:
            del param_group[name]  # super() has put all defaults there
        try:
            self.index_parameters()
        except ValueError:
            del self.param_groups[-1]
            raise

    def hypers_of(self, group: Mapping[str, Any]) -> type:
        """Returns the class of a group's rules, a dataclass of its hyper-parameters."""
        return self._rules.hypers(group)

    def check_param_groups(self) -> None:
        """Follows edits of ``param_groups``, and checks the hyper-parameters that groups have now.

        Raises:
            ValueError: a value is not allowed, or a parameter cannot be stepped or is in two
                groups; nothing has been stepped.
        """
        self.follow_groups()
        self.index.refuse_repeated()
        for row, group in enumerate(self.index.groups):
            self._rules.of(row, group)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "index" not in self.__dict__:  # it is a copy, or unpickled
            self._reset()
        super().__setstate__(state)
        self.index_parameters()

    @property
    def group_of(self) -> dict[Tensor, ParamGroup]:
        """The group of each parameter."""
        return self.index.group_of

    @property
    def row_of(self) -> dict[Tensor, int]:
        """The number of each parameter's group."""
        return self.index.row_of

    @property
    def number_of(self) -> dict[Tensor, int]:
        """The number of each parameter, the same on every rank."""
        return self.index.number_of

    def follow_groups(self) -> None:
        """Takes up edits of ``param_groups`` since the last call, such as parameters moved.

        Raises:
            ValueError: as of ``index_parameters``.
        """
        if not self.index.is_of(self.param_groups):
            self.index_parameters()

    def index_parameters(self) -> None:
        """Indexes ``param_groups`` anew.

        Raises:
            ValueError: a new parameter cannot be stepped; the index stays as it was.
        """
        before, index = self.index, Index(self.param_groups, self.numbers)
        new = {p: None for p in index.number_of if p not in before.number_of}
        unfit.refuse_params(self, new)
        kinds = {self.hypers_of(group) for group in index.groups}
        self._has_batched_rule = any(rules.entry_of(kind).is_batched for kind in kinds)
        self.index = index
        if len(index.number_of) == len(before.number_of):  # accelerate replaces all for FSDP2
            pairs = zip(before.number_of, index.number_of, strict=True)
            now = {p: q for p, q in pairs if p not in index.number_of and q in new}
            self.stacks = {now.get(p, p): first for p, first in self.stacks.items()}
        self._plans.clear()
        if self.meter is not None:
            self.meter.groups = len(index.groups)
            if any(index.row_of.get(p) != row for p, row in before.row_of.items()):
                self.meter.clear()  # its sums are by rows
        spread_state.make(self, index.number_of)

    def number_among(self, names: Mapping[Tensor, str], groups: Sequence[Sequence[str]]) -> None:
        """Numbers parameters among those of a model of which other ranks have other parameters.

        Args:
            names: of this rank's.
            groups: the names of all parameters of each group, the same on all ranks.
        """
        self.names = [list(group) for group in groups]
        numbers = {name: i for i, name in enumerate(itertools.chain(*groups))}
        self.numbers = {param: numbers[names[param]] for param in self.group_of}
        self.index_parameters()

    def separate_experts(
        self,
        module: nn.Module,
        first: Mapping[Tensor, int] | None = None,
        shape: Callable[[Tensor], expert_stacks.Shape] = expert_stacks.plain_shape,
    ) -> "RuleOptimizer":
        """Steps each expert of ``module`` as a matrix of its own where one parameter holds many.

        An engine and ``fuse_into_backward`` call it; call it yourself, before the first step,
        where neither is used.

        Args:
            module: the model; ``expert_stacks.find`` tells which of its parameters stack experts.
            first: which expert is a parameter's first, where other ranks have others.
            shape: tells the shape of a whole parameter, of which this process may hold a part.

        Returns:
            The optimizer itself.

        Raises:
            ValueError: such a parameter was stepped as a whole before.
        """
        found = expert_stacks.find(module, shape)
        for param in found - self.stacks.keys():
            if self.state.get(param, {}).get("step") == 0:
                del self.state[param]
        unfit.refuse_states(self, {p: self.state[p] for p in found if self.state.get(p)}, found)
        self.stacks = {p: (first or {}).get(p, 0) for p in found} | self.stacks
        self._plans.clear()
        spread_state.make(self, [p for p in self.group_of if p in found])
        return self

    @torch.no_grad()
    def update(
        self,
        updates: Iterable[RunUpdate],
        all_reduce: Callable[[Tensor], None] | None,
        judge: Verdict | None = None,
    ) -> int:
        """Steps the given runs in lock-step, writing weights and states in place.

        Runs and states that lie elsewhere than their gradients are copied there for the step.
        Gradients on several devices are stepped device by device, in rounds of their own.

        Args:
            updates: runs, in the same order on all ranks.
            all_reduce: adds up a flat tensor of partial sums over the ranks, in place; None where
                no other rank adds to them.
            judge: names the gradients that are to be judged by the first round, and is told what
                that says; those that are bad are not stepped by. None: all are known to be good.

        Returns:
            How many rounds it took.

        Raises:
            ValueError: a hyper-parameter was set to a value that is not allowed.
        """
        judge = judge or Verdict()
        return sum(self._update_on_device(x, all_reduce, judge) for x in by_device(updates))

    def take_back(self, params: Iterable[Tensor]) -> None:
        """Makes the states of parameters those of a step before, which kernels have left alone.

        Args:
            params: those whose gradients were bad, as the host was told after their step.
        """
        params = list(params)
        for param in params:
            take_back(self.state[param])
            if self.meter is not None and param in self.number_of:
                self.meter.forget(self.number_of[param])
            if not self.state[param]:
                del self.state[param]
        self._plans.forget_sums(params)

    def in_kernels(self, shards: Mapping[Tensor, Shard], device: torch.device) -> set[Tensor]:
        """Returns those parameters that kernels step in batches, the same on all ranks.

        Args:
            shards: the parameters, and the run of each.
            device: of their gradients, whose dtypes kernels take.
        """
        if not devices.take(device) or not self._has_batched_rule:
            return set()
        return {p for p, s in shards.items() if are_batched(self, p, s, [p.dtype], device)}

    def settle(self) -> None:
        """Takes the weights of the last ``update`` to be as it left them.

        To be called after torch was told that they were written to, for all ranks to see.
        """
        for known, runs in self.written.items():
            known.note(runs)
        self.written.clear()

    def _update_on_device(
        self,
        updates: list[RunUpdate],
        all_reduce: Callable[[Tensor], None] | None,
        judge: Verdict,
    ) -> int:
        """The same for gradients on one device."""
        step = self.begin(updates, judge)
        rounds = lockstep.run(step.rules, all_reduce)
        step.end()
        return rounds

    def begin(self, updates: Sequence[RunUpdate], judge: Verdict | None = None) -> BucketStep:
        """Begins the step of runs whose gradients are on one device.

        Args:
            updates: the runs.
            judge: as of ``update``.

        Returns:
            The step; its ``rules`` are to be run to their end, with those of other ranks, and then
            its ``end`` called.
        """
        staged = [StagedRun.of(u, self.state[u.param], self.offload) for u in updates]
        is_batched = bool(staged) and self._is_batched_on(staged[0].update.g.device)
        plan = self._plans.prepare(self, staged, is_batched)
        return BucketStep(self, staged, plan, judge or Verdict())

    def _is_batched_on(self, device: torch.device) -> bool:
        """Whether parameters on a device are stepped in batches; the same on all ranks."""
        if devices.take(device):
            return self._has_batched_rule
        return device == CPU and self.is_batched

    @property
    def is_batched(self) -> bool:
        """Whether parameters on a CPU are stepped in batches, by native passes."""
        if self._is_native is None and self._has_batched_rule:
            self._is_native = table.is_there()
        return self._has_batched_rule and bool(self._is_native)

    @is_batched.setter
    def is_batched(self, value: bool) -> None:
        self._is_native = value

    def rules(self, u: RunUpdate, state: dict[str, Any] | None = None) -> list[lockstep.Rule]:
        """Begins a parameter's step, counting it in its state, which is made if there is none.

        Args:
            u: the run to step.
            state: what is kept of it, if not that in ``self.state``; written in place.

        Returns:
            The rules to run to their end: one, or one for each expert of a stack.
        """
        state = self.state[u.param] if state is None else state
        rule = self.rule_of(u.param)
        if not state:
            fitting.make(self, u, state)
        state["step"] += 1
        t, p = state["step"], self._weight(u, state, rule)
        if u.param not in self.stacks:
            return [rule.step(self._metered(p, u, u.p), u.g, state, t, u.shard)]
        begun = []
        experts = state[expert_stacks.EXPERTS].values()
        for s, (run, shard) in zip(experts, expert_stacks.split(u.shard), strict=True):
            own = self._metered(weight_update.part(p, run), u, u.p[run])
            begun.append(rule.step(own, expert_stacks.part(u.g, run), s, t, shard))
        return begun

    def _weight(self, u: RunUpdate, state: dict[str, Any], rule: Any) -> weight_update.Weight:
        """What a rule reads and writes as the weight, which may have a master or be rounded."""
        before = self.elements_before(u)
        return weight_update.weight(u.p, state, rule, self.number_of[u.param], u.shard, before)

    def elements_before(self, u: RunUpdate) -> int:
        """Elements of a stack's experts that lie on other ranks, before those of this one."""
        return self.stacks.get(u.param, 0) * math.prod(u.shard.shape[1:])

    def _metered(self, p: weight_update.Weight, u: RunUpdate, run: Tensor) -> ops.Writable:
        """The weight kept in ``run``, measured while it is written if a meter is set."""
        if self.meter is None:
            return p
        number, row = self.number_of[u.param], self.row_of[u.param]
        return self.meter.watch(p, number, row, run, u.num_replicas)

    def shard(self, param: Tensor) -> Shard:
        """Returns which elements of a parameter this process steps."""
        if self.fused is not None and param in self.fused.shards:
            return self.fused.shard(param)
        return self.whereabouts.shard(param)

    def keeps(self, param: Tensor, shard: Shard, rule: Rule) -> Parts:
        """Returns what ``rule`` keeps of a run of a parameter, nested by expert for a stack."""
        if param not in self.stacks:
            return rule.keeps(shard)
        return expert_stacks.keeps(rule, shard, self.stacks[param])

    def rule_of(self, param: Tensor) -> Any:
        """Returns the rule of a parameter, with the hyper-parameters that its group has now.

        Raises:
            ValueError: one of them was set to a value that is not allowed.
        """
        return self.rule_at(self.index.row_of[param])

    def rule_at(self, row: int) -> Any:
        """Returns the rule of a group by its number, as ``rule_of``."""
        return self._rules.of(row, self.index.groups[row])

    def is_relative(self, param: Tensor) -> bool:
        """Whether the steps of a parameter are in proportion to its size, by its group's rule."""
        rule = self.rule_of(param)
        return rules.entry_of(type(rule)).is_relative(rule)

    def shows_first(self, shards: Mapping[Tensor, Shard]) -> set[Tensor]:
        """Returns those parameters whose gradients the first round of their step can judge.

        It comes before any change, in the step that their rule would make now. They are the same
        on all ranks.

        Args:
            shards: the parameters, and the run of each that tensor parallelism has not cut.
        """
        self._trials.renew({row: self.rule_at(row) for row in {self.row_of[p] for p in shards}})
        comes_first = self._trials.comes_first
        return {
            p
            for p, shard in shards.items()
            if p not in self.stacks and comes_first(self.row_of[p], shard, p.dtype)
        }

    def weights(self, param: Tensor, p: Tensor, shard: Shard) -> Tensor:
        """Returns the weights of a run ``p``, [len(shard)]: fp32 if there is a master of them."""
        masters = {k: v for k, v in self.state.get(param, {}).items() if k in weight_update.MASTER}
        return weight_update.values(p, host_offload.state_to_device(masters, p.device), shard)

    @torch.no_grad()
    def write_weights(self, param: Tensor, p: Tensor, shard: Shard, values: Tensor) -> None:
        """Overwrites a run ``p`` and its master, if there is one, by ``values``, [len(shard)]."""
        how = self.rule_of(param) if param in self.group_of else weight_update.Writing("nearest")
        state = self.state.get(param, {})
        weight_update.set_(p, state, how, shard, values)
        for name in weight_update.MASTER & state.keys():
            state[name] = host_offload.store(state[name], param.device, self.offload)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient, which this process holds whole.

        Or as DTensors: then all ranks of their mesh call it, with gradients of the same ones.

        Args:
            closure: computes the loss and its gradients anew, and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a hyper-parameter was set to a value that is not allowed, or a parameter
                is complex. No weight has moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.end_backward is not None:
            self.end_backward()
        plain_step.step(self)
        return loss

    def move_states(self, wanted: Callable[[str], bool], move: Callable[[Tensor], Tensor]) -> None:
        """Puts ``move`` of tensors of the states in their place, of those whose key is wanted."""
        for state in self.state.values():
            for key in filter(wanted, state):
                state[key] = _mapped(state[key], move)
        self._plans.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns states and groups as torch's, with the states of DTensors as DTensors.

        Those that cannot be cut by the rows of their parameter are whole: all ranks call it.
        The state of a parameter that is in no group any more is not saved.
        """
        self.follow_groups()
        gone = [p for p in self.state if isinstance(p, Tensor) and p not in self.group_of]
        left = {p: self.state.pop(p) for p in gone}
        saved = super().state_dict()
        self.state.update(left)
        for i, param in enumerate(self.params()):
            if i in saved["state"]:
                saved["state"][i] = spread_state.saved(self, param, saved["state"][i])
        return saved

    def params(self) -> list[Tensor]:
        """Returns all parameters, by their number in what is saved."""
        return list(itertools.chain(*(group["params"] for group in self.param_groups)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Overwrites states and hyper-parameters by saved ones, ``weight_update`` among them.

        As torch's, but states have the dtypes that their rule declares: statistics of bf16 weights
        are fp32. Of states of DTensors, or whole ones, each rank takes its part.

        Args:
            state_dict: what ``state_dict()`` returned.

        Raises:
            ValueError: it is the state of another optimizer, or of parameters of other shapes;
                nothing is changed.
        """
        self.follow_groups()
        states: dict[Tensor, dict[str, Any]] = {}

        def prepare(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            found = fitting.read(self, given)
            ids = itertools.chain(*(group["params"] for group in given["param_groups"]))
            numbers = dict(zip(ids, self.params(), strict=True))
            states.update((numbers[i], state) for i, state in found.items())
            return {**given, "state": {**given["state"], **found}}

        def keep(_: torch.optim.Optimizer) -> None:
            self.state.update(states)

        # The caller's pre-hooks come before these, and the post-hooks after them.
        before = self.register_load_state_dict_pre_hook(prepare)
        after = self.register_load_state_dict_post_hook(keep, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


def _mapped(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A state, nested in dicts, with ``move`` of each tensor."""
    if isinstance(value, dict):
        return {key: _mapped(inner, move) for key, inner in value.items()}
    return move(value) if isinstance(value, Tensor) else value
