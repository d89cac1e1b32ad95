"""Param groups, the rules that their values make, and what an optimizer knows of a parameter."""

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, make_dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ds_ext import hyperparams, rules
from ds_ext.distributed import dtensors
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement
from ds_ext.ops import sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.optimizer import expert_stacks, host_offload
from ds_ext.optimizer.ema import EmaConfig, GroupRule
from ds_ext.optimizer.sections import SectionConfig
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.rules import Rule

ParamGroup: TypeAlias = dict[str, Any]

# The optimizer's hyper-parameters that are defaults for groups of other rules, too.
SHARED = (
    *("lr", "weight_decay"),
    *hyperparams.names(sixteen_bit.RoundingConfig),
    *hyperparams.names(EmaConfig),
)
VALUES = {"lr", "weight_decay"}  # hyper-parameters that decide neither states nor batches
ADDED = {"ema_decay", "ema_dtype", "nbits"}  # since the first version
PLAIN = {float, int, bool, str, tuple, type(None)}  # types of values that strict checks accept


def of_this_version(group: Mapping[str, Any], hypers: type) -> dict[str, Any]:
    """Returns a saved group, with the hyper-parameters that this version has.

    Raises:
        ValueError: the group used one that version 1.0 had.
    """
    known = {f.name: f.default for f in fields(hypers)}
    gone = hyperparams.REMOVED.keys() - known
    for key in sorted(gone & group.keys()):
        if group[key] != hyperparams.REMOVED[key][0]:
            raise ValueError(
                f"{key} = {group[key]!r} is a hyper-parameter of ds_ext 1.0, which this version "
                "does not have: finish that run with ds_ext 1.0, or load only the weights."
            )
    added = {key: default for key, default in known.items() if key in ADDED}
    return {**added, **{k: v for k, v in group.items() if k not in gone}}


class GroupIndex:
    """The group of each parameter at the time the index was made.

    Args:
        groups: the param groups.
        numbers: numbers of parameters, if ranks have different parameters. Other parameters are
            numbered in the order of the groups.

    Attributes:
        groups: the param groups, in order.
        group_of: the param group of each parameter.
        group_index_of: the position of that group in ``groups``.
        number_of: the number of each parameter, the same on every rank.
        has_dtensors: whether a parameter is a DTensor.

    Raises:
        ValueError: a parameter is in two groups.
    """

    def __init__(self, groups: Sequence[ParamGroup], numbers: Mapping[Tensor, int]) -> None:
        self.groups = tuple(groups)
        self._params = [tuple(group["params"]) for group in groups]
        self.group_of: dict[Tensor, ParamGroup] = {}
        self.group_index_of: dict[Tensor, int] = {}
        self.number_of: dict[Tensor, int] = {}
        for group_index, params in enumerate(self._params):
            for param in params:
                first = self.group_index_of.setdefault(param, group_index)
                if first != group_index:
                    raise ValueError(
                        f"a parameter is in param_groups[{first}] and in "
                        f'param_groups[{group_index}]: take it out of "params" of one of them.'
                    )
                self.group_of[param] = self.groups[first]
                self.number_of.setdefault(param, numbers.get(param, len(self.number_of)))
        self.has_dtensors = any(map(dtensors.is_dtensor, self.number_of))

    def is_of(self, groups: Sequence[ParamGroup]) -> bool:
        """Returns whether ``groups`` are the same dicts, with the same parameters in order.

        Compares identities only, which takes about 20 ns per parameter.
        """
        if len(groups) != len(self.groups):
            return False
        for group, known, params in zip(groups, self.groups, self._params, strict=True):
            now = group["params"]
            is_same = group is known and len(now) == len(params)
            if not is_same or not all(map(operator.is_, now, params)):
                return False
        return True


@functools.cache
def hypers_of(rule: type[rules.Rule]) -> type:
    """Returns a subclass of a rule, with the hyper-parameters that the optimizer reads.

    These follow the rule's own: the fields of ``weight_update.RoundingConfig`` and
    ``ema.EmaConfig``, and those of ``sections.SectionConfig`` if the rule steps sections of
    matrices.

    Raises:
        ValueError: the state of the rule has a key that ds_ext uses itself.
    """
    split = (SectionConfig,) if rules.entry_of(rule).has_sections else ()
    bases = (GroupRule, *split, rule)
    doc = {"__doc__": rule.__doc__}  # else help() shows the annotations of all fields
    made = make_dataclass(rule.__name__, [], bases=bases, namespace=doc, frozen=True)
    for shape in ((2, 2), (2,)):  # ``state_spec`` refuses reserved keys
        made().state_spec(Shard.whole(shape))
    return made


def names_of_all_rules() -> set[str]:
    """Returns the names of the hyper-parameters of all rules."""
    return {name for entry in rules.REGISTRY.values() for name in hyperparams.names(entry.rule)}


def _structure(rule: GroupRule) -> object:
    """What a rule's states, batches and checks of gradients may depend on.

    That is all but lr, weight_decay, and the values of nonzero floats: ``state_spec`` and the
    functions of ``register`` may test a float only against 0.
    """
    values = (_value_structure(value) for name, value in vars(rule).items() if name not in VALUES)
    return type(rule), *values


def _value_structure(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_value_structure, value))
    return (float, value != 0) if isinstance(value, float) else value


class GroupRules:
    """Makes, checks and caches rules; makes a new rule after a scheduler or user edits a group.

    ``rule`` is that of groups without a "type".

    Attributes:
        version: changes when the class or the structure of a group's rule has changed.
    """

    def __init__(self, rule: type[rules.Rule]) -> None:
        self.rule, self.version = rule, 0
        # By the position of the group: the class of its rule, the values, and the rule.
        self._made: dict[int, tuple[type, list[object], GroupRule]] = {}

    def complete(self, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a group with all hyper-parameters, and "type" if it has another rule.

        Args:
            group: parameters, hyper-parameters, and keys that other code reads.
            defaults: the optimizer's hyper-parameters. A group of another rule takes only those
                that all rules have in common.

        Raises:
            ValueError: an unknown type, or as of ``hyperparams.check``; or a key looks like a
                misspelt one, or belongs to another rule.
        """
        rule = rules.named(group["type"], "type").rule if "type" in group else self.rule
        hypers = hypers_of(rule)
        names = hyperparams.names(hypers)
        given = {k: v for k, v in group.items() if k in names}
        others = {k: v for k, v in group.items() if k not in names and k != "type"}
        hyperparams.refuse_misspelt(hypers, others, names_of_all_rules())
        if rule is self.rule:
            own = {k: v for k, v in defaults.items() if k in names}  # torch adds some of its own
            return {**others, **checked_hypers(hypers, {**own, **given})}
        shared = {k: defaults[k] for k in SHARED if defaults.get(k) is not None}
        return {**others, "type": rule.__name__, **checked_hypers(hypers, {**shared, **given})}

    def hypers(self, group: Mapping[str, Any]) -> type:
        """Returns the class of a group's rule, a dataclass of hyper-parameters."""
        return hypers_of(rules.named(group["type"]).rule if "type" in group else self.rule)

    def of(self, group_index: int, group: Mapping[str, Any]) -> GroupRule:
        """Returns the rule of a group.

        Args:
            group_index: the position of the group in ``param_groups``.
            group: the group. NumPy scalars and tensors of one element count as numbers.

        Raises:
            ValueError: a value is not allowed, as of ``hyperparams.check``.
        """
        hypers = self.hypers(group)
        names = hyperparams.names(hypers)
        try:
            values = list(map(group.__getitem__, names))
        except KeyError as error:
            raise ValueError(
                f"param_groups[{group_index}] has no {error}: edit the existing group instead of "
                "replacing it, or call add_param_group, which adds the defaults."
            ) from None
        if not PLAIN.issuperset(map(type, values)):
            values = list(map(_plain, values))
        made = self._made.get(group_index)
        # A NaN differs from itself, so it is checked each time.
        if made is None or made[0] is not hypers or made[1] != values:
            given = dict(zip(names, values, strict=True))
            checked = hyperparams.check(hypers, given, f"param_groups[{group_index}]")
            rule = hypers(**checked)
            if made is None or _structure(rule) != _structure(made[2]):
                self.version += 1
            made = self._made[group_index] = hypers, values, rule
        return made[2]


def checked_hypers(hypers: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``hyperparams.check``, but keeps scalar tensors. Each step reads them, as torch's."""
    tensors = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.numel() == 1}
    return {**hyperparams.check(hypers, given, ""), **tensors}


def _plain(value: Any) -> Any:
    """An immutable value that strict checks accept."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, list):
        return tuple(value)
    if not hasattr(value, "item"):
        return value
    is_scalar = math.prod(value.shape) == 1  # of a tensor, or of a NumPy array or scalar
    return value.item() if is_scalar else tuple(value.tolist())


class ParamTable:
    """Looks up a parameter's group, number, rule, shard and state.

    Attributes:
        rule: the rule of groups without a "type".
        param_groups, state: torch.optim.Optimizer sets both.
        index: the group and number of each parameter, as of the last step or edit of the groups.
        group_of, group_index_of, number_of: those of ``index``.
        stacks: the parameters whose first dimension counts experts, and the number of their first
            expert on this rank. Each expert is stepped as a separate parameter.
        numbers, names: of all parameters of a model whose ranks hold different ones; else empty.
        fused: the layout of the model that is stepped inside backward; None without hooks.
        offload: where states lie between steps; None: on the device of their parameter.
        is_exchanged: whether the model has the averages of its weights, inside ``ema()``.
        update_stats: sums up the sizes of updates and weights; None: they are not measured.
            Measuring takes 1 to 4 times a step's time on a CPU, and an fp32 copy of the weights of
            a bucket.
    """

    rule: ClassVar[type[Rule]]
    param_groups: list[ParamGroup]
    state: defaultdict[Tensor, Any]
    fused: Layout | None = None
    is_exchanged = False

    def __init__(self) -> None:
        self.use_index(GroupIndex([], {}))
        self.stacks: dict[Tensor, int] = {}
        self.numbers: dict[Tensor, int] = {}
        self.names: list[list[str]] = []
        self.offload: host_offload.HostOffload | None = None
        self.update_stats: UpdateStats | None = None
        self._rules = GroupRules(self.rule)
        self._placements = dtensors.DTensorPlacementCache()

    def use_index(self, index: GroupIndex) -> None:
        """Looks parameters up in another index from now on."""
        self.index = index
        self.group_of, self.number_of = index.group_of, index.number_of
        self.group_index_of = index.group_index_of

    @property
    def version(self) -> tuple[GroupIndex, dict[Tensor, int], int]:
        """Changes if ``batches``, states or checks of gradients of a parameter may have changed."""
        return self.index, self.stacks, self._rules.version

    def refuse_exchanged(self) -> None:
        """Raises RuntimeError if the model has the averages of its weights."""
        if self.is_exchanged:
            raise RuntimeError(
                "the model has the averages of its weights, because this runs inside ema(). Leave "
                "the context first: training steps, and saving and loading of checkpoints or "
                "optimizer states, need the weights themselves. (save_16bit_model and "
                "save_pretrained save the averages.)"
            )

    def params(self) -> list[Tensor]:
        """Returns all parameters in the order of ``state_dict``."""
        return list(itertools.chain(*(group["params"] for group in self.param_groups)))

    def name(self, param: Tensor) -> str:
        """Returns the name of a parameter, or its position and shape if it has no name."""
        if self.fused is not None:
            return self.fused.name(param)
        group = self.group_of[param]
        i = next(i for i, p in enumerate(group["params"]) if p is param)
        names = group.get("param_names")
        if names:
            return str(names[i])
        return f"parameter {i} of group {self.group_index_of[param]}, of shape {[*param.shape]},"

    def hypers_of(self, group: Mapping[str, Any]) -> type:
        """Returns the class of a group's rule, a dataclass of its hyper-parameters."""
        return self._rules.hypers(group)

    def rule_of(self, param: Tensor) -> GroupRule:
        """Returns the rule of a parameter, with the hyper-parameters that its group has now.

        Raises:
            ValueError: a hyper-parameter was set to a value that is not allowed.
        """
        return self.rule_at(self.index.group_index_of[param])

    def rule_at(self, group_index: int) -> GroupRule:
        """Returns the rule of a group by its position; raises as ``rule_of``."""
        return self._rules.of(group_index, self.index.groups[group_index])

    def is_relative(self, param: Tensor) -> bool:
        """Returns whether a parameter's rule makes updates in proportion to the weights."""
        rule = self.rule_of(param)
        return rules.entry_of(type(rule)).is_relative(rule)

    def state_spec(self, param: Tensor, shard: Shard, rule: Rule) -> Parts:
        """Returns the state that ``rule`` declares for a run, nested by expert for a stack."""
        if param not in self.stacks:
            return rule.state_spec(shard)
        return expert_stacks.state_spec(rule, shard, self.stacks[param])

    def elements_before(self, param: Tensor, shard: Shard) -> int:
        """Returns how many elements of a stack lie on other ranks, before this rank's experts."""
        return self.stacks.get(param, 0) * math.prod(shard.shape[1:])

    def placement(self, param: Tensor) -> Placement | None:
        """Returns the placement of a DTensor; None for a plain tensor."""
        return self._placements.of(param) if dtensors.is_dtensor(param) else None

    def shard(self, param: Tensor) -> Shard:
        """Returns which elements of a parameter this process steps."""
        if self.fused is not None and param in self.fused.shards:
            return self.fused.shards[param]
        placement = self.placement(param)
        return Shard.whole(param.shape) if placement is None else placement.shard(param)

    def weights(self, param: Tensor, p: Tensor, shard: Shard) -> Tensor:
        """Returns the weights of a run ``p``, [len(shard)]; in fp32 if the run has a master."""
        masters = {k: v for k, v in self.state.get(param, {}).items() if k == "master"}
        return sixteen_bit.values(p, host_offload.state_to_device(masters, p.device), shard)

    @torch.no_grad()
    def write_weights(self, param: Tensor, p: Tensor, shard: Shard, values: Tensor) -> None:
        """Overwrites a run ``p`` and its master, if there is one, by ``values``, [len(shard)]."""
        is_ours = param in self.group_of
        rounding = self.rule_of(param) if is_ours else sixteen_bit.RoundingConfig("nearest")
        state = self.state.get(param, {})
        sixteen_bit.set_(p, state, rounding, shard, values)
        if "master" in state:
            state["master"] = host_offload.store(state["master"], param.device, self.offload)
