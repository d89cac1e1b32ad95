"""The rule of each param group, made of the hyper-parameters that the group has now."""

import functools
from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any

from ds_ext import hyperparams, rules
from ds_ext.ops import weight_update

# What a group of another rule takes of the optimizer's hyper-parameters where it has none.
SHARED = ("lr", "weight_decay", *hyperparams.names(weight_update.Writing))


@functools.cache
def hypers_of(rule: type[rules.Rule]) -> type:
    """Returns a rule with the fields of ``weight_update.Writing`` after its own."""
    bases = (weight_update.Writing, rule)
    return make_dataclass(rule.__name__, [], bases=bases, frozen=True)


class GroupRules:
    """Makes the rule of a param group, anew and checked when a scheduler or a user changed it.

    Args:
        rule: of groups that have no "type".
    """

    def __init__(self, rule: type[rules.Rule]) -> None:
        self.rule = rule
        self._made: dict[int, tuple[list[Any], Any]] = {}  # values, and the rule made of them

    def complete(self, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the "type" of a new group, if it has another, and all of its hyper-parameters.

        Args:
            group: those that it is given.
            defaults: the optimizer's, which it has otherwise; of those only what all rules have in
                common if its type is another.

        Raises:
            ValueError: an unknown type, or as of ``hyperparams.check``.
        """
        given = {k: v for k, v in group.items() if k != "type"}
        rule = rules.named(group["type"]).rule if "type" in group else self.rule
        if rule is self.rule:
            return hyperparams.check(hypers_of(rule), {**defaults, **given})
        shared = {k: defaults[k] for k in SHARED if defaults.get(k) is not None}
        return {
            "type": rule.__name__,
            **hyperparams.check(hypers_of(rule), {**shared, **given}),
        }

    def hypers(self, group: Mapping[str, Any]) -> type:
        """Returns the class of a group's rules, a dataclass of hyper-parameters."""
        return hypers_of(rules.named(group["type"]).rule if "type" in group else self.rule)

    def of(self, row: int, group: Mapping[str, Any]) -> Any:
        """Returns the rule of a group.

        Args:
            row: the group's number in ``param_groups``.
            group: its hyper-parameters, among others. Scalars of NumPy and tensors of one element
                count as their numbers.

        Raises:
            ValueError: a value is not allowed, as of ``hyperparams.check``.
        """
        hypers = self.hypers(group)
        values = [_plain(group[name]) for name in hyperparams.names(hypers)]
        made = self._made.get(row)
        if made is None or made[0] != values:  # also where one is NaN, which differs from itself
            given = dict(zip(hyperparams.names(hypers), values, strict=True))
            checked = hyperparams.check(hypers, given, f"param_groups[{row}]")
            made = self._made[row] = values, hypers(**checked)
        return made[1]


def _plain(value: Any) -> Any:
    """A value that strict checks understand, and that nobody changes in place."""
    if isinstance(value, list):
        return tuple(value)
    return value.item() if hasattr(value, "item") else value
