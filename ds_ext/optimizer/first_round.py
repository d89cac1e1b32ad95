"""Whether a rule reaches its first round before it writes anything.

The first round of such a rule can judge gradients: a bad one is found before it has any effect. The
rule is tried once on a short run of zeros, and the version counters of weight and state are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops import scratch
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves, zeros
from ds_ext.optimizer.group_rules import structure

TRIED_STEPS = (1, 2)  # the step numbers that a rule is tried with
Answers: TypeAlias = dict[tuple[tuple[int, ...], int, torch.dtype], bool]  # by shape, cut and dtype


class Trials:
    """Tries rules, and remembers the answers."""

    _found: ClassVar[dict[object, Answers]] = {}  # by structures of rules

    def __init__(self) -> None:
        self._of_group: dict[int, tuple[Any, Answers]] = {}

    def renew(self, rules: Mapping[int, Any]) -> None:
        """Sets the rules that groups have now, by the positions of the groups."""
        for group_index, rule in rules.items():
            known = self._of_group.get(group_index)
            if known is None or known[0] is not rule:
                self._of_group[group_index] = rule, self._found.setdefault(structure(rule), {})

    def comes_first(self, group_index: int, shard: Shard, dtype: torch.dtype) -> bool:
        """Returns whether a rule's first round comes before any write; the same on all ranks.

        Args:
            group_index: position of the rule's group, given to ``renew`` before.
            shard: the run; neither tensor parallelism nor a stack of experts has cut it.
            dtype: of weights and gradients.
        """
        rule, answers = self._of_group[group_index]
        key = shard.shape, shard.size, dtype
        if key not in answers:
            answers[key] = all(_comes_first(rule, _short(shard), dtype, t) for t in TRIED_STEPS)
        return answers[key]


def _comes_first(rule: Any, shard: Shard, dtype: torch.dtype, t: int) -> bool:
    """Whether a step that has reached its first round has written to no tensor."""
    p, g = (torch.zeros(len(shard), dtype=dtype, device="cpu") for _ in range(2))
    parts = rule.keeps(shard)
    state = zeros(parts, p)
    tensors = [p, g, *(_at(state, path) for path, _ in leaves(parts))]
    before = [x._version for x in tensors]
    sums = next(rule.step(p, g, state, t, shard), ())
    scratch.clear()  # the CPU's: a GPU run needs none there
    return bool(sums) and before == [x._version for x in tensors]


def _short(shard: Shard) -> Shard:
    """At most one row of the parameter, with the same cut, so all ranks get the same answer."""
    return replace(shard, start=0, stop=min(shard.cols, shard.size, shard.numel))


def _at(state: Any, path: Sequence[str]) -> Tensor:
    for key in path:
        state = state[key]
    assert isinstance(state, Tensor)
    return state
