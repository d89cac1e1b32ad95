"""The parameters of an optimizer: group, number, rule, stacked experts, placement and state."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_ext import rules
from ds_ext.distributed import dtensors
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement
from ds_ext.ops import sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts
from ds_ext.optimizer import expert_stacks, host_offload
from ds_ext.optimizer.groups import GroupIndex, GroupRules, ParamGroup
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.rules import Rule


class ParamTable:
    """Looks up a parameter's group, number, rule, shard and state.

    Attributes:
        rule: the rule of groups without a "type".
        param_groups, state: torch.optim.Optimizer sets both.
        index: the group and number of each parameter, as of the last step or edit of the groups.
        stacks: the parameters whose first dimension counts experts, and the number of their first
            expert on this rank. Each expert is stepped as a separate parameter.
        numbers, names: of all parameters of a model whose ranks hold different ones; else empty.
        fused: the layout of the model that is stepped inside backward; None without hooks.
        offload: where states lie between steps; None: on the device of their parameter.
        is_exchanged: whether the model has the averages of its weights, inside ``ema()``.
        update_stats: sums up the sizes of updates and weights; None: they are not measured.
            Measuring takes 5 to 30 % of a step's time on a CPU, more for bf16 rounded to nearest.
    """

    rule: ClassVar[type[Rule]]
    param_groups: list[ParamGroup]
    state: defaultdict[Tensor, Any]
    fused: Layout | None = None
    is_exchanged = False

    def __init__(self) -> None:
        self.index = GroupIndex([], {})
        self.stacks: dict[Tensor, int] = {}
        self.numbers: dict[Tensor, int] = {}
        self.names: list[list[str]] = []
        self.offload: host_offload.HostOffload | None = None
        self.update_stats: UpdateStats | None = None
        self._rules = GroupRules(self.rule)
        self._placements = dtensors.DTensorPlacementCache()

    @property
    def group_of(self) -> dict[Tensor, ParamGroup]:
        """The group of each parameter."""
        return self.index.group_of

    @property
    def group_index_of(self) -> dict[Tensor, int]:
        """The position of each parameter's group in ``param_groups``."""
        return self.index.group_index_of

    @property
    def number_of(self) -> dict[Tensor, int]:
        """The number of each parameter, the same on every rank."""
        return self.index.number_of

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

    def rule_of(self, param: Tensor) -> Any:
        """Returns the rule of a parameter, with the hyper-parameters that its group has now.

        Raises:
            ValueError: a hyper-parameter was set to a value that is not allowed.
        """
        return self.rule_at(self.index.group_index_of[param])

    def rule_at(self, group_index: int) -> Any:
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
            return self.fused.shard(param)
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
