"""The rule of each param group, made of the hyper-parameters that the group has now."""

from collections.abc import Mapping
from typing import Any

from ds_ext import hyperparams


class GroupRules:
    """Makes the rule of a param group, anew and checked when a scheduler or a user changed it.

    Args:
        hypers: the class of rules, a dataclass of hyper-parameters.
    """

    def __init__(self, hypers: type) -> None:
        self.hypers = hypers
        self.names = hyperparams.names(hypers)
        self._made: dict[int, tuple[list[Any], Any]] = {}  # values, and the rule made of them

    def of(self, row: int, group: Mapping[str, Any]) -> Any:
        """Returns the rule of a group.

        Args:
            row: the group's number in ``param_groups``.
            group: its hyper-parameters, among others. Scalars of NumPy and tensors of one element
                count as their numbers.

        Raises:
            ValueError: a value is not allowed, as of ``hyperparams.check``.
        """
        values = [_plain(group[name]) for name in self.names]
        made = self._made.get(row)
        if made is None or made[0] != values:  # also where one is NaN, which differs from itself
            given = dict(zip(self.names, values, strict=True))
            checked = hyperparams.check(self.hypers, given, f"param_groups[{row}]")
            made = self._made[row] = values, self.hypers(**checked)
        return made[1]


def _plain(value: Any) -> Any:
    """A value that strict checks understand, and that nobody changes in place."""
    if isinstance(value, list):
        return tuple(value)
    return value.item() if hasattr(value, "item") else value
