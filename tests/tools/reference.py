"""The reference page made from the code: keys of a config."""

import dataclasses
import json
import re
from collections import Counter
from typing import Any, NamedTuple, get_type_hints

from ds_ext import hyperparams
from ds_ext.ops.sixteen_bit import RoundingConfig
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.ema import EmaConfig
from ds_ext.optimizer.sections import SectionConfig
from ds_ext.rules import REGISTRY
from ds_ext.settings import Section

# What the page says instead of the comment, where a user needs other words than a maintainer.
_FOR_USERS = {"weight_update": "rounding of 16-bit weights"}
_FOR_USERS |= {"ema_decay": "of the moving average of weights; 0: none"}
_FOR_USERS |= {"ema_dtype": "of the average; `bf16` is rounded stochastically"}


def keys() -> str:
    """Lists of all keys: of the section "ds_ext", of several optimizers, and of each one."""
    lines = ['## The section `"ds_ext"`', "", *(k.line() for k in _keys(Section)), ""]
    lines += ["## `optimizer.params` of every optimizer", ""]
    lines += [*(k.line() for kind in (RoundingConfig, EmaConfig) for k in _keys(kind)), ""]
    splitting = [entry.spelling for entry in REGISTRY.values() if entry.has_sections]
    lines += [f"## Sections of matrices: {', '.join(splitting)}", ""]
    lines += [*(k.line() for k in _keys(SectionConfig)), ""]
    own = {
        rule: [k for k in _keys(rule) if k.name == "seed" or k.name not in _WRITING]
        for rule in (entry.rule for entry in REGISTRY.values())
        if _parent(rule) is None
    }
    counts = Counter(k.meaning_only() for found in own.values() for k in found)
    common: dict[str, Key] = {}  # by name, the most frequent meaning; of equals, the first
    for key, count in counts.most_common():
        if count >= 2:
            common.setdefault(key.name, key)
    lines += ["## Keys of several optimizers", "", *(common[k].line() for k in sorted(common)), ""]
    for key, entry in REGISTRY.items():
        rule = entry.rule
        lines += [f"## {entry.spelling}", ""]
        if parent := _parent(rule):
            lines += [_changed(rule, parent), ""]
        else:
            shared = [k for k in own[rule] if k.meaning_only() == common.get(k.name)]
            values = ", ".join(f"`{k.name}` `{k.default}`" for k in shared)
            lines += [f"- {values}"] if shared else []
            lines += [k.line() for k in own[rule] if k not in shared]
            lines += ["", _others(entry.roles), ""] if entry.others is not None else [""]
        assert key in OPTIMIZERS
    return "\n".join(lines).rstrip()


class Key(NamedTuple):
    """A key of a config: what it may be, what it means and its default."""

    name: str
    allowed: str
    meaning: str
    default: str = ""

    def meaning_only(self) -> "Key":
        """The key without its default."""
        return self._replace(default="")

    def line(self) -> str:
        """The key as an entry of a list."""
        values = [f"`{self.default}`"] if self.default else []
        values += [self.allowed] if self.allowed != "boolean" else []
        return f"- `{self.name}` ({'; '.join(values)}): {self.meaning}"


def _parent(rule: type) -> type | None:
    """The registered rule that this one only changes defaults of."""
    rules = {entry.rule: entry for entry in REGISTRY.values()}
    return next((base for base in rule.__mro__[1:] if base in rules), None)


def _changed(rule: type, parent: type) -> str:
    """The defaults that differ from those of another rule with the same keys."""
    own, theirs = ({f.name: f.default for f in dataclasses.fields(kind)} for kind in (rule, parent))
    assert own.keys() == theirs.keys()
    new = [f"`{k}` {json.dumps(own[k])}" for k in own if own[k] != theirs[k]]
    return f"The keys of {parent.__name__}, with other defaults: {', '.join(new)}."


def _allowed(hint: Any) -> str:
    """What a field's type allows, as formulas: "≥ 0"."""
    text = hyperparams.describe(hint)
    if several := re.fullmatch(r"a list of (\d): \[(.*)\]", text):
        kinds = set(re.findall(r"a (?:whole )?number(?: [<>]=? 0| in \[0, 1\))?", several[2]))
        assert len(kinds) == 1
        return f"{several[1]} numbers {_symbols(kinds.pop())}".rstrip()
    return _symbols(text)


def _symbols(text: str) -> str:
    text = text.replace("a whole number ", "integer ")
    text = re.sub(r"a number ?", "", text) if text != "a number" else ""
    text = text.replace(">= 0", "≥ 0").replace("true or false", "boolean")
    return text.replace('"', "`")


def _keys(kind: type) -> list[Key]:
    hints = get_type_hints(kind, include_extras=True)
    meanings = hyperparams.meanings(kind)
    return [
        Key(
            field.name,
            _allowed(hints[field.name]),
            _FOR_USERS.get(field.name) or meanings[field.name],
            json.dumps(field.default),
        )
        for field in dataclasses.fields(kind)
    ]


_WRITING = {field.name for field in dataclasses.fields(RoundingConfig)}


def _others(roles: Any) -> str:
    """What steps the parameters that an optimizer is not for."""

    def said(role: str) -> str:
        own = ", ".join(f"`{k}` {json.dumps(v)}" for k, v in roles[role].items() if k != "type")
        return roles[role].get("type", "the same optimizer") + (f" with {own}" if own else "")

    kinds = {"embedding": "embeddings", "head": "output head", "other": "all others"}
    told: dict[str, list[str]] = {}
    for role, name in kinds.items():
        told.setdefault(said(role), []).append(name)
    if len(told) == 1:
        return f"For matrices of linear layers; {next(iter(told))} for the rest."
    others = "; ".join(f"{what} ({', '.join(names)})" for what, names in told.items())
    return f"For matrices of linear layers. Other parameters: {others}."
