"""torch.optim.Optimizer around a rule: parameter groups, state, and a plain ``step()``."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ds_ext import expert_stacks, host_offload, hyperparams, ops, rules
from ds_ext.distributed import lockstep
from ds_ext.distributed.wrapped import refuse_cut
from ds_ext.meter import Meter
from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts, State, zeros
from ds_ext.ops.triton import launches
from ds_ext.rules import Rule

# Elements of parameters that a plain step takes together, at least.
TOGETHER = 2**22
# What a group may hold beside its parameters and hyper-parameters: names, a scheduler's note, and
# DeepSpeed's that it is of experts.
_GROUP_KEYS = {"params", "param_names", "name", "initial_lr", "moe"}


class Update(NamedTuple):
    """One rank's part in the step of one parameter."""

    param: Tensor  # the key of its state and group
    p: Tensor  # this rank's run of the weight, [len(shard)], updated in place
    g: ops.Gradient  # the same run of the gradient
    shard: Shard
    num_replicas: int = 1  # ranks that update this run and count it in the sizes of updates


class RuleOptimizer(torch.optim.Optimizer):
    """Steps every parameter by ``rule``; hyper-parameters are the fields of the rule's dataclass.

    And those of ``weight_update.Writing``: how the weights are rounded. Raises ValueError for an
    unknown or ill-valued hyper-parameter, here and in groups.

    ``meter``, if it is set, sums up the sizes of updates and weights: 5 to 30 % of a step's time on
    a CPU, more for bf16 rounded to nearest.
    """

    rule: ClassVar[type[rules.Rule]]
    fused: Container[Tensor] | None = None  # what is stepped inside backward, if it is
    hypers: ClassVar[type]  # the rule, with the fields of ``weight_update.Writing`` after its own

    def __init_subclass__(cls) -> None:
        bases = (weight_update.Writing, cls.rule)
        cls.hypers = make_dataclass(cls.rule.__name__, [], bases=bases, frozen=True)
        params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        hypers = inspect.signature(cls.hypers).parameters.values()
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [params, *(h.replace(kind=inspect.Parameter.KEYWORD_ONLY) for h in hypers)]
        )

    def __init__(self, params: Iterable[Any], **hypers: Any) -> None:
        self.meter: Meter | None = None
        # parameters whose first dimension counts experts, and the number of their first one
        self.stacks: dict[Tensor, int] = {}
        # where states lie between steps; None: on the device
        self.home: host_offload.Home | None = None
        # of each parameter: its group, the number of that, and its own
        self.group_of: dict[Tensor, dict[str, Any]] = {}
        self.row_of: dict[Tensor, int] = {}
        self.number_of: dict[Tensor, int] = {}
        super().__init__(params, self.check(hypers))

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """All hyper-parameters, the given ones checked, the others at their defaults.

        Raises ValueError, naming the key of the JSON config, as ``hyper.check``.
        """
        return hyperparams.check(cls.hypers, given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = {k: v for k, v in param_group.items() if k not in _GROUP_KEYS}
        checked = self.check(self.defaults | given)
        super().add_param_group(param_group | checked)
        try:
            self._check_params(self.param_groups[-1]["params"])
        except ValueError:
            del self.param_groups[-1]
            raise
        self._index_group(len(self.param_groups) - 1)

    def refuse_complex(self, params: Iterable[Tensor]) -> None:
        """Raises ValueError if one of ``params``, which are to be stepped, is complex."""
        for param in params:
            if param.is_complex():
                raise ValueError(
                    f"{type(self).__name__}: a parameter of shape {list(param.shape)} is "
                    f"{param.dtype}, which no rule is made for: make its real and imaginary parts "
                    "the parameter (torch.view_as_real), or freeze it."
                )

    def _check_params(self, params: Sequence[Tensor]) -> None:
        """Raises ValueError for parameters that cannot be stepped."""
        refuse_cut(params)
        self.refuse_complex(p for p in params if p.requires_grad)
        if self.fused is not None and any(p not in self.fused for p in params):
            raise ValueError(
                "add_param_group: a parameter is not part of the model that is stepped inside "
                "backward. Build the model with it, frozen if need be."
            )

    def __getstate__(self) -> dict[str, Any]:
        own = {"meter": self.meter, "stacks": self.stacks, "home": self.home}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index()

    def _index(self) -> None:
        """Notes each parameter's group, and its number, which is the same on every rank."""
        self.group_of, self.row_of, self.number_of = {}, {}, {}
        for row in range(len(self.param_groups)):
            self._index_group(row)

    def _index_group(self, row: int) -> None:
        """Notes the same of the parameters of one more group."""
        for param in self.param_groups[row]["params"]:
            self.group_of[param] = self.param_groups[row]
            self.row_of[param] = row
            self.number_of[param] = len(self.number_of)
        if self.meter is not None:
            self.meter.groups = len(self.param_groups)

    def separate_experts(
        self,
        module: nn.Module,
        first: Mapping[Tensor, int] | None = None,
        shape: Callable[[Tensor], expert_stacks.Shape] = expert_stacks.plain_shape,
    ) -> "RuleOptimizer":
        """Steps each expert of ``module`` as a matrix of its own where one parameter holds many.

        -> self. An engine and ``fuse_into_backward`` call it; call it yourself, before the first
        step, where neither is used. ``expert_stacks.find`` tells which parameters these are;
        ``first``, which expert is a parameter's first where other ranks have others; ``shape``,
        that of a whole parameter where this process holds a part.
        """
        found = expert_stacks.find(module, shape)
        self._check_state({p: self.state[p] for p in found if self.state.get(p)}, found)
        self.stacks = {p: (first or {}).get(p, 0) for p in found} | self.stacks
        return self

    def _check_state(self, states: Mapping[Tensor, State], stacked: Container[Tensor]) -> None:
        """Raises ValueError for a state of a stack that is not by expert, and the reverse."""
        for param, state in states.items():
            if (expert_stacks.EXPERTS in state) != (param in stacked):
                raise ValueError(
                    f"{type(self).__name__}: the state of a parameter of shape "
                    f"{tuple(param.shape)} was made with"
                    f"{'out' if param in stacked else ''} its experts separate. Call "
                    "optimizer.separate_experts(model) before the first step, and before "
                    "load_state_dict, in both runs or in neither."
                )

    @torch.no_grad()
    def update(self, updates: Iterable[Update], all_reduce: Callable[[Tensor], None] | None) -> int:
        """Steps the given runs in lock-step, summing statistics by ``all_reduce``; -> rounds.

        Runs and states that lie elsewhere than their gradients visit these for it. Gradients on
        several devices are stepped device by device, in rounds of their own.
        """
        on: dict[torch.device, list[Update]] = {}
        for u in updates:
            on.setdefault(u.g.device, []).append(u)
        return sum(self._update(alike, all_reduce) for alike in on.values())

    def _update(self, updates: list[Update], all_reduce: Callable[[Tensor], None] | None) -> int:
        """The same for gradients on one device."""
        at_home = [(u, self.state[u.param]) for u in updates]
        visits = [
            (u._replace(p=host_offload.visit(u.p, u.g.device)), self._visiting(state, u.g.device))
            for u, state in at_home
        ]
        begun: list[lockstep.Rule] = []
        with launches.together() as next_parameter:
            for u, state in visits:
                begun += self.rules(u, state)
                next_parameter()
        taken = lockstep.run(begun, all_reduce)
        with launches.together() as next_parameter:
            for u, state in visits:
                weight_update.mark(u.p, state)
                next_parameter()
        for (u, state), (visitor, stepped) in zip(at_home, visits, strict=True):
            if visitor.p is not u.p:
                u.p.copy_(visitor.p, non_blocking=True)
            if self.home is not None:
                self.home.take(state, stepped)
        return taken

    def _visiting(self, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """A state to be stepped on ``device``."""
        return state if self.home is None else host_offload.brought(state, device)

    def rules(self, u: Update, state: dict[str, Any] | None = None) -> list[lockstep.Rule]:
        """Starts the rules of one parameter: one, or one for each expert of a stack."""
        state = self.state[u.param] if state is None else state
        rule, p = self._prepared(u, state)
        t = state["step"]
        if u.param not in self.stacks:
            return [rule.step(self._watched(p, u, u.p), u.g, state, t, u.shard)]
        begun = []
        experts = state[expert_stacks.EXPERTS].values()
        for s, (run, shard) in zip(experts, expert_stacks.split(u.shard), strict=True):
            own = self._watched(weight_update.part(p, run), u, u.p[run])
            begun.append(rule.step(own, expert_stacks.part(u.g, run), s, t, shard))
        return begun

    def _prepared(self, u: Update, state: dict[str, Any]) -> tuple[Any, weight_update.Weight]:
        """The rule of a parameter, and what it reads and writes as its weight.

        The state is made if there is none, and this step is counted in it.
        """
        rule = self.rule_of(u.param)
        if not state:
            state.update(zeros(self.keeps(u.param, u.shard, rule), u.p), step=0)
        state["step"] += 1
        before = self.stacks.get(u.param, 0) * math.prod(u.shard.shape[1:])
        number = self.number_of[u.param]
        return rule, weight_update.weight(u.p, state, rule, number, u.shard, before)

    def _watched(self, p: weight_update.Weight, u: Update, run: Tensor) -> ops.Writable:
        """The same, measured if a meter is set."""
        if self.meter is None:
            return p
        return self.meter.watch(p, self.row_of[u.param], run, u.num_replicas)

    def keeps(self, param: Tensor, shard: Shard, rule: Rule) -> Parts:
        """What ``rule`` keeps of a parameter."""
        if param not in self.stacks:
            return rule.keeps(shard)
        return expert_stacks.keeps(rule, shard, self.stacks[param])

    def rule_of(self, param: Tensor) -> Any:
        """The rule of a parameter, with the hyper-parameters that its group has now."""
        group = self.group_of[param]
        return self.hypers(**{name: group[name] for name in hyperparams.names(self.hypers)})

    def weights(self, param: Tensor, p: Tensor, shard: Shard) -> Tensor:
        """The weights of a run ``p``, [len(shard)]: in fp32 if there is a master of them."""
        masters = {k: v for k, v in self.state.get(param, {}).items() if k in ("master", "marks")}
        return weight_update.values(p, host_offload.brought(masters, p.device), shard)

    @torch.no_grad()
    def write_weights(self, param: Tensor, p: Tensor, shard: Shard, values: Tensor) -> None:
        """Makes ``values`` the weights of a run ``p``; of its master too, if it has state."""
        how = self.rule_of(param) if param in self.group_of else weight_update.Writing("nearest")
        state = self.state.get(param, {})
        weight_update.set_(p, state, how, shard, values)
        if "master" in state:
            state["master"] = host_offload.place(state["master"], param.device, self.home)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient, each held whole by this process."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refuse_complex(p for p in self.number_of if p.grad is not None)
        bucket: list[Tensor] = []
        elements = 0
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None:
                bucket.append(param)
                elements += param.numel()
            if elements >= TOGETHER:
                self._step_whole(bucket)
                bucket, elements = [], 0
        self._step_whole(bucket)
        return loss

    def _step_whole(self, params: list[Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        updates = []
        for param, grad in zip(params, grads, strict=True):
            p = param.detach().contiguous().view(-1)
            g = grad.to_dense().contiguous().view(-1)
            updates.append(Update(param, p, g, Shard.whole(param.shape)))
        self.update(updates, None)
        for param, p, *_ in updates:
            if not param.is_contiguous():
                param.copy_(p.view_as(param))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the state keeps its dtype: statistics of bf16 weights stay fp32.

        Hyper-parameters are then the saved ones, ``weight_update`` and ``seed`` among them.
        Raises ValueError, before anything is changed, for the state of another optimizer.
        """
        for group in state_dict["param_groups"]:
            missing = [name for name in hyperparams.names(self.hypers) if name not in group]
            if missing:
                kind = type(self).__name__
                raise ValueError(f"not a state of {kind}: a group has no {', '.join(missing)}.")
        ids = itertools.chain(*(group["params"] for group in state_dict["param_groups"]))
        params = itertools.chain(*(group["params"] for group in self.param_groups))
        saved = state_dict["state"]
        states = {p: saved[i] for i, p in zip(ids, params, strict=False) if i in saved}
        self._check_state(states, self.stacks)
        super().load_state_dict(state_dict)
        for param, state in states.items():
            self.state[param] = _to(state, param.device)


def _to(value: Any, device: torch.device) -> Any:
    """A copy of a state, nested in dicts, on ``device``."""
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


@functools.cache
def _optimizer_of(rule: type[rules.Rule]) -> type[RuleOptimizer]:
    """The optimizer that steps by ``rule``, under the rule's name: ``ds_ext.AdaLomo``."""
    body = {"rule": rule, "__doc__": rule.__doc__, "__module__": "ds_ext"}
    return type(rule.__name__, (RuleOptimizer,), body)


class _Optimizers(Mapping[str, type[RuleOptimizer]]):
    """An optimizer for each registered rule, by the rule's name in lower case."""

    def __getitem__(self, name: str) -> type[RuleOptimizer]:
        return _optimizer_of(rules.REGISTRY[name].rule)

    def __iter__(self) -> Iterator[str]:
        return iter(rules.REGISTRY)

    def __len__(self) -> int:
        return len(rules.REGISTRY)


OPTIMIZERS = _Optimizers()
