"""Makes param groups from a model and "params" of a config's section "optimizer".

Groups are divided by weight decay; by ``param_groups``, whose entries match names and have keys of
their own, such as "type"; and, if a rule is not for all parameters, by ``target_modules``. The
other parameters get the keys of ``others``.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ds_ext import hyperparams
from ds_ext.errors import raise_all
from ds_ext.optimizer import sections
from ds_ext.optimizer.model_view import ModelView, finds, summary
from ds_ext.optimizer.param_table import ParamGroup, hypers_of
from ds_ext.optimizer.sections import SectionConfig
from ds_ext.rules import RuleEntry, named
from ds_ext.settings import PLACES

Keys: TypeAlias = Mapping[str, Any]  # of a group: a "type" and hyper-parameters of that
T = TypeVar("T")
SECTION = "optimizer.params"
OWN_KEYS = ("param_groups", "target_modules", "others")  # which choose parameters by their names
_NOT_SHOWN = ("params", "name", "type", "weight_decay")


class Grouped(NamedTuple):
    """The arguments of an optimizer."""

    groups: list[ParamGroup]
    hypers: dict[str, Any]  # all hyper-parameters, the defaults of groups


class Params:
    """The checked "params" of a config's section "optimizer".

    Attributes:
        problems: errors in the keys; what is wrong is left out of the other attributes.
        hypers: all hyper-parameters of the optimizer's rule.
        entries: of ``param_groups``: an expression, and the keys of its group.
        targets: the expressions of ``target_modules``; empty: "all-linear".
        rest: the keys of the parameters that the rule does not step.
    """

    def __init__(self, entry: RuleEntry, given: Keys, where: str) -> None:
        self.entry, self.where = entry, where
        rest = dict(given)
        entries = rest.pop("param_groups", None)
        targets, others = "all-linear", None
        if entry.roles:
            targets, others = rest.pop("target_modules", targets), rest.pop("others", None)
        own_keys = OWN_KEYS if entry.roles else OWN_KEYS[:1]
        places = PLACES if where else ()
        hypers = hypers_of(entry.rule)
        self.hypers, self.problems = hyperparams.checked(hypers, rest, where, own_keys, places)
        listed = self._noted(self._entries_of, entries) or ()
        read = [self._noted(self._entry_of, i, x) for i, x in enumerate(listed)]
        self.entries: list[tuple[str, Keys]] = [x for x in read if x]
        self.targets: Sequence[str] = self._noted(_patterns, targets, self.targets_key) or ()
        self.rest: Keys = (self._noted(self._rest, others) or {}) if entry.roles else {}

    def key(self, name: str) -> str:
        """Returns a key for messages."""
        return hyperparams.dotted(self.where, name)

    def entry_of(self, group: ParamGroup) -> RuleEntry:
        """Returns the registry's entry of a group's rule."""
        return named(group["type"]) if "type" in group else self.entry

    @property
    def targets_key(self) -> str:
        """The key of ``target_modules`` for messages."""
        return f"{self.entry.rule.__name__}: {self.key('target_modules')}"

    def _noted(self, check: Callable[..., T], *args: object) -> T | None:
        """Returns what a check returns; None if it raises ValueError, which ``problems`` notes."""
        try:
            return check(*args)
        except ValueError as error:
            self.problems.extend(str(error).splitlines())
            return None

    def _entries_of(self, entries: object) -> list[object]:
        """The entries of ``param_groups``; ValueError if it is given and no list of entries."""
        if entries is None:
            return []
        if not isinstance(entries, list) or not entries:
            key = self.key("param_groups")
            raise ValueError(f"{key} is {entries!r}; allowed: a list of {_ENTRY}.")
        return entries

    def _entry_of(self, i: int, given: object) -> tuple[str, Keys]:
        """The expression and the keys of entry number ``i``; ValueError if one is wrong."""
        where = self.key(f"param_groups[{i}]")
        if not isinstance(given, dict) or not isinstance(given.get("match"), str):
            raise ValueError(f"{where} is {given!r}; allowed: {_ENTRY}.")
        if len(given) < 2:
            raise ValueError(
                f'{where} has only a "match", which changes nothing; allowed: {_ENTRY}.'
            )
        keys = dict(given)
        pattern = keys.pop("match")
        _refuse_invalid(pattern, f"{where}.match")
        return pattern, self._checked(keys, where)

    def _checked(self, given: Keys, where: str) -> Keys:
        """The checked keys of a group; ValueError for wrong keys."""
        keys = {k: v for k, v in given.items() if k != "type"}
        entry = named(given["type"], f"{where}.type") if "type" in given else self.entry
        checked = hyperparams.check(hypers_of(entry.rule), keys, where, ("type",))
        return {k: entry.rule.__name__ if k == "type" else checked[k] for k in given}

    def _rest(self, others: object) -> Keys:
        """The keys of the remaining parameters: those of the registry, and those of the config."""
        registered = self.entry.roles["other"]
        if others is None:
            return registered
        where = self.key("others")
        if not isinstance(others, dict) or not others:
            raise ValueError(f'{where} is {others!r}; allowed: keys such as {{"lr": 1e-4}}.')
        own = others if "type" in others else {**registered, **others}
        return self._checked(own, where)


def of_config(
    entry: RuleEntry,
    given: Keys,
    model: ModelView,
    params: Sequence[Tensor | ParamGroup],
    where: str = SECTION,
) -> Grouped:
    """Returns the groups and hyper-parameters that a config asks for.

    Args:
        entry: the registry's entry of the optimizer's rule.
        given: "params" of the config's section "optimizer".
        model: the model.
        params: the parameters to train, or groups of them, which are then split further.
        where: the section of the config, for messages; "" for arguments in Python.

    Raises:
        ValueError: a key is unknown or its value wrong, or it is not clear how to step a
            parameter; the message names the key.
    """
    read = Params(entry, given, where)
    raise_all(read.problems)
    groups = _as_groups(params)
    decay = read.hypers.get("weight_decay", 0.0)  # a rule may have none
    if decay and groups and not any(isinstance(x, dict) for x in params):
        groups = decay_groups(model, groups[0]["params"], decay)
    if read.entries:
        groups = _matched_groups(model, groups, read)
    if entry.roles:
        groups = _role_groups(model, groups, read)
    _refuse_vectors(model, groups, read)
    groups = _read_groups(groups, read)
    _refuse_sections(model, groups, read)
    return Grouped(_named(entry, groups, decay), read.hypers)


def stand_ins(entry: RuleEntry, given: Keys) -> tuple[list[str], Grouped]:
    """Returns errors in a config's keys, and the groups that it may make if there are none.

    Both are what can be known without a model: each group has one matrix without storage.
    """
    read = Params(entry, given, SECTION)
    keys: list[Keys] = [{}, *(own for _, own in read.entries)]
    if entry.roles:
        keys += [read.rest, *entry.roles.values()]
    # Not of one tensor: within zero.Init, torch.empty makes it on a device.
    matrices = [Parameter(torch.empty(8, 8, dtype=torch.float32, device="meta")) for _ in keys]
    groups = [{"params": [p], **own} for p, own in zip(matrices, keys, strict=True)]
    return read.problems, Grouped(groups, read.hypers)


def described(
    groups: Sequence[ParamGroup], optimizer: str, names: Mapping[Tensor, str]
) -> list[str]:
    """Returns lines such as "AdamW, lr=1e-4 on: h.*.weight (2)", for groups that are not alike."""
    kinds: dict[str, list[str]] = {}
    for group in groups:
        own = {k: v for k, v in group.items() if k not in _NOT_SHOWN}
        kind = ", ".join([group.get("type", optimizer), *(f"{k}={v}" for k, v in own.items())])
        trained = (names[p] for p in group["params"] if p.requires_grad)
        kinds.setdefault(kind, []).extend(trained)
    return [f"{kind} on: {summary(found)}" for kind, found in kinds.items()]


def _named(entry: RuleEntry, groups: Sequence[ParamGroup], decay: float) -> list[ParamGroup]:
    """Gives groups unique names for metrics: "AdaLomo", "AdaLomo_no_decay", "lora_"."""
    names: Counter[str] = Counter()
    made = []
    for group in groups:
        name = group.get("name") or group.get("type", entry.rule.__name__)
        name += "_no_decay" * (decay > 0 and group.get("weight_decay") == 0)
        names[name] += 1
        made.append({**group, "name": f"{name}_{names[name]}" if names[name] > 1 else name})
    return made


def decay_groups(model: ModelView, params: list[Tensor], weight_decay: float) -> list[ParamGroup]:
    """Splits parameters into one group with weight decay and one without.

    Norms, biases and other parameters with fewer than two dimensions do not decay. For a stack, the
    dimensions of one expert count.
    """
    decayed = [p for p in params if p in model and model[p].decays]
    chosen = set(decayed)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in params if p not in chosen], "weight_decay": 0.0},
    ]


def _matched_groups(
    model: ModelView, groups: Sequence[ParamGroup], read: Params
) -> list[ParamGroup]:
    """Splits groups by the entries of ``param_groups``; at most one may match a parameter.

    An expression is searched in names. Parameters without a match stay in their group.

    Raises:
        ValueError: an expression matches nothing, or two match one parameter.
    """
    trained = [p for group in groups for p in group["params"] if p in model]
    chosen: dict[Tensor, int] = {}
    for i, (pattern, _) in enumerate(read.entries):
        match = read.key(f"param_groups[{i}].match")
        for p in _matched(pattern, trained, model, match):
            if p in chosen:
                raise ValueError(
                    f"{match}: {pattern!r} matches {model[p].name}, as does "
                    f"param_groups[{chosen[p]}]: one entry at most may match a parameter."
                )
            chosen[p] = i
    keys = [{**own, "name": pattern} for pattern, own in read.entries]
    return _split(groups, lambda p: keys[chosen[p]] if p in chosen else {})


def _role_groups(model: ModelView, groups: Sequence[ParamGroup], read: Params) -> list[ParamGroup]:
    """Splits groups into the rule's own matrices and the rest; groups with a "type" do not change.

    The own matrices are those whose names ``target_modules`` matches, or with "all-linear" the
    weights of all linear layers except the output head, and the matrices of stacked experts.

    Raises:
        ValueError: ``target_modules`` matches no trained matrix.
    """
    free = [group for group in groups if "type" not in group]
    matrices = [p for g in free for p in g["params"] if p in model and len(model[p].shape) == 2]
    chosen = set(_targets(read.targets, matrices, model, read.targets_key)) if free else set()
    roles = read.entry.roles

    def keys(p: Tensor) -> Keys:
        if p in chosen:
            return {}
        own = roles.get(model[p].role if p in model else "other", roles["other"])
        return read.rest if own == roles["other"] else own

    return [part for g in groups for part in ([g] if "type" in g else _split([g], keys))]


def _refuse_vectors(model: ModelView, groups: Sequence[ParamGroup], read: Params) -> None:
    """Raises ValueError if a group gives a parameter to a rule that steps only matrices."""
    for group in groups:
        entry = read.entry_of(group)
        for p in (p for p in group["params"] if p in model and not entry.any_shape):
            if len(model[p].shape) != 2:
                raise ValueError(
                    f"{read.where or 'params'}: {entry.rule.__name__} steps only matrices, and "
                    f"{model[p].name}, which {group.get('name', 'others')!r} gives to it, has the "
                    f'shape {[*model[p].shape]}: give it "type": "{entry.others}".'
                )


def _read_groups(groups: Sequence[ParamGroup], read: Params) -> list[ParamGroup]:
    """Leaves out keys of entries and sections that a group's rule lacks, as matched biases do.

    Raises:
        ValueError: no group of an entry has one of its keys.
    """
    optional = {key for _, own in read.entries for key in own} | {*hyperparams.names(SectionConfig)}
    kept = []
    for group in groups:
        unread = optional - {"type", *hyperparams.names(hypers_of(read.entry_of(group).rule))}
        kept.append({k: v for k, v in group.items() if k not in unread})
    for i, (match, own) in enumerate(read.entries):
        used = {key for group in kept if group.get("name") == match for key in group}
        if key := next((key for key in own if key not in used), None):
            raise ValueError(
                f"{read.key(f'param_groups[{i}].{key}')}: {match!r} matches no parameter whose "
                'optimizer has it: remove it, or add "type", such as "AdamW", and keys of that.'
            )
    return kept


def _refuse_sections(model: ModelView, groups: Sequence[ParamGroup], read: Params) -> None:
    """Raises ValueError if the sections of a group are not those of its matrices."""
    keys = hyperparams.names(SectionConfig)

    def value(group: ParamGroup, key: str) -> Any:
        return group.get(key, None if "type" in group else read.hypers.get(key))

    rows = {match: i for i, (match, own) in enumerate(read.entries) if {*keys} & own.keys()}
    for group in groups:
        i = rows.get(group.get("name", ""))
        section = read.where if i is None else read.key(f"param_groups[{i}]")
        how = SectionConfig(**{key: x for key in keys if (x := value(group, key)) is not None})
        for p in (p for p in group["params"] if p in model):
            sections.refuse(how, model[p].shape, model[p].name, hyperparams.dotted(section, ""))


def _as_groups(params: Sequence[Tensor | ParamGroup]) -> list[ParamGroup]:
    """Parameters, groups, or a list of both, as groups."""
    groups: list[ParamGroup] = []
    for x in params:
        if isinstance(x, dict):
            groups.append({**x, "params": list(x["params"])})
        elif groups:
            groups[0]["params"].append(x)
        else:
            groups.append({"params": [x]})
    return groups


def _split(groups: Sequence[ParamGroup], keys_of: Callable[[Tensor], Keys]) -> list[ParamGroup]:
    """Splits groups by the keys that parameters add to their group's.

    The new groups are in order of first occurrence; parameters without keys come first.
    """
    split: list[ParamGroup] = []
    for group in groups:
        parts: dict[str, ParamGroup] = {repr({}): {**group, "params": []}}
        for p in group["params"]:
            keys = keys_of(p)
            parts.setdefault(repr(keys), {**group, **keys, "params": []})["params"].append(p)
        split += [part for part in parts.values() if part["params"]]
    return split


def _matched(
    pattern: str, params: list[Tensor], model: ModelView, where: str, what: str = "parameter"
) -> list[Tensor]:
    """The parameters whose names match ``pattern``; ValueError if there are none."""
    names = {p: model[p].name for p in params}
    found = [p for p, name in names.items() if finds(pattern, name)]
    if not found:
        parts = {part for name in names.values() for part in name.split(".")}
        guess = hyperparams.did_you_mean(pattern, parts)
        raise ValueError(
            f"{where}: {pattern!r} matches no trained {what}.{guess} "
            f"Known: {summary(names.values())}."
        )
    return found


def _targets(
    patterns: Sequence[str], matrices: list[Tensor], model: ModelView, where: str
) -> list[Tensor]:
    """The matrices that ``target_modules`` selects."""
    if not patterns:
        linear = [p for p in matrices if model[p].role == "linear"]
        if not linear:
            raise ValueError(
                f'{where} is "all-linear", but no nn.Linear weight is trained: list names.'
            )
        return linear
    return [p for pattern in patterns for p in _matched(pattern, matrices, model, where, "matrix")]


def _patterns(targets: object, where: str) -> Sequence[str]:
    """The expressions of ``target_modules``, () for "all-linear"; ValueError if one is invalid."""
    if targets == "all-linear":
        return ()
    patterns = [targets] if isinstance(targets, str) else targets
    if not patterns or not isinstance(patterns, list | tuple) or "" in patterns:
        raise ValueError(
            f'{where} is {targets!r}; allowed: "all-linear" or a list of (parts of) names.'
        )
    for pattern in patterns:
        _refuse_invalid(pattern, where)
    return patterns


def _refuse_invalid(pattern: str, where: str) -> None:
    """Raises ValueError if ``pattern`` is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        text = f"{where}: {pattern!r} is not a regular expression: {error}."
        raise ValueError(text) from None


_ENTRY = '{"match": "a regular expression", "type": "an optimizer", and keys of that}'
