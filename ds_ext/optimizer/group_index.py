"""An index of ``param_groups``, which detects edits of the groups."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

ParamGroup = dict[str, Any]


class GroupIndex:
    """The group of each parameter at the time the index was made.

    Args:
        groups: the param groups.
        numbers: numbers of parameters, if ranks have different parameters. Other parameters are
            numbered in the order of the groups.

    Attributes:
        groups: the param groups, in order.
        group_of: the param group of each parameter; the first one, if several groups have it.
        group_index_of: the position of that group in ``groups``.
        number_of: the number of each parameter, the same on every rank.
    """

    def __init__(self, groups: Sequence[ParamGroup], numbers: Mapping[Tensor, int]) -> None:
        self.groups = tuple(groups)
        self._params = [tuple(group["params"]) for group in groups]
        self._repeated: tuple[int, int] | None = None
        self.group_of: dict[Tensor, ParamGroup] = {}
        self.group_index_of: dict[Tensor, int] = {}
        self.number_of: dict[Tensor, int] = {}
        for group_index, params in enumerate(self._params):
            for param in params:
                first = self.group_index_of.setdefault(param, group_index)
                if first != group_index:
                    self._repeated = first, group_index
                self.group_of[param] = self.groups[first]
                self.number_of.setdefault(param, numbers.get(param, len(self.number_of)))

    def is_of(self, groups: Sequence[ParamGroup]) -> bool:
        """Returns whether ``groups`` are the same dicts, with the same parameters in order.

        Compares identities only, which takes about 20 ns per parameter.
        """
        if len(groups) != len(self.groups):
            return False
        for group, known, params in zip(groups, self.groups, self._params, strict=True):
            now = group["params"]
            if group is not known or len(now) != len(params):
                return False
            if not all(map(operator.is_, now, params)):
                return False
        return True

    def refuse_repeated(self) -> None:
        """Raises ValueError if a parameter is in two groups."""
        if self._repeated is not None:
            first, second = self._repeated
            raise ValueError(
                f"a parameter is in param_groups[{first}] and in param_groups[{second}]: take it "
                'out of "params" of one of them.'
            )
