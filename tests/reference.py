"""Reference pages made from the code: keys of a config, and commands."""

import argparse
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterable
from typing import Any, get_type_hints

from ds_ext import hyperparams
from ds_ext.backward.settings import Section
from ds_ext.commands.cli import COMMANDS
from ds_ext.ops.weight_update import Writing
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY

# What keys mean that have no comment of their own, since the field knows them.
_USUAL = {
    "lr": "learning rate",
    "betas": "decay rates of the momentum and of the second moment",
    "eps": "added to the root of the second moment",
    "bias_correction": "moments are divided by 1 - beta^t",
    "correct_bias": "moments are divided by 1 - beta^t",
    "decay_rate": "the second moment decays by 1 - t^decay_rate",
    "momentum": "its decay rate",
    "nesterov": "the step looks ahead by one of the momentum",
    "ns_coefficients": "of the Newton-Schulz iteration",
}


def keys() -> str:
    """Tables of all keys: of every optimizer, of all optimizers, and of the section "ds_ext"."""
    lines = ['## The section `"ds_ext"`', "", *_table(Section), ""]
    lines += ["## `optimizer.params` of every optimizer", "", *_table(Writing), ""]
    for key, entry in REGISTRY.items():
        rule = entry.rule
        lines += [f"## {entry.spelling}", "", f"{entry.summary}", ""]
        lines += [*_table(rule, {f.name for f in dataclasses.fields(Writing)} - {"seed"}), ""]
        if entry.others is not None:
            lines += [_others(entry.roles), ""]
        assert key in OPTIMIZERS
    return "\n".join(lines).rstrip()


def _table(kind: type, without: Iterable[str] = ()) -> list[str]:
    """A row for each field: what it may be, its default and what it means."""
    hints = get_type_hints(kind, include_extras=True)
    rows = ["| key | allowed | default | |", "|---|---|---|---|"]
    meanings = _comments(kind)
    for field in dataclasses.fields(kind):
        if field.name in set(without):
            continue
        allowed = hyperparams.describe(hints[field.name]).replace("|", "\\|")
        default = json.dumps(field.default)
        said = meanings.get(field.name) or _USUAL[field.name]
        rows.append(f"| `{field.name}` | {allowed} | `{default}` | {said} |".replace("  ", " "))
    return rows


def _comments(kind: type) -> dict[str, str]:
    """The comments of a dataclass's fields: behind each, or alone on the line before."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        before = ""
        for line in inspect.getsource(base).splitlines():
            if alone := re.fullmatch(r"\s+# (.*)", line):
                before = alone[1]
            elif field := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
                found[field[1]] = field[2] or before or found.get(field[1], "")
                before = ""
    return found


def _others(roles: Any) -> str:
    """What steps the parameters that an optimizer is not for."""

    def said(role: str) -> str:
        own = ", ".join(f"`{k}` {json.dumps(v)}" for k, v in roles[role].items() if k != "type")
        return roles[role].get("type", "the same optimizer") + (f" with {own}" if own else "")

    kinds = {"embedding": "Embeddings", "head": "the output head", "other": "the rest"}
    told = [f"{name}: {said(role)}" for role, name in kinds.items()]
    return (
        'It steps the matrices of linear layers that `target_modules` names (`"all-linear"`). '
        f"{'; '.join(told)}. `others` gives keys for the rest."
    )


def commands() -> str:
    """The help of every command, as wide as a page whatever the terminal."""
    lines = []
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(
            prog=f"python -m ds_ext {name}",
            description=command.description,
            formatter_class=functools.partial(argparse.HelpFormatter, width=88),
        )
        command.add_options(parser)
        lines += [f"### {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines).rstrip()
