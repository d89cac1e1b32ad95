"""``python -m ds_ext check``: lists all problems of a DeepSpeed config within seconds.

It calls the functions by which a run reads its config, without weights, ranks or a device. A model
is made on the device "meta".
"""

import argparse
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ds_ext.config import config_checks, parsing
from ds_ext.config.config_checks import Named, named_optimizer
from ds_ext.config.parsing import lookup, normalized
from ds_ext.optimizer import param_groups
from ds_ext.optimizer.model_view import ModelView, summary
from ds_ext.optimizer.param_table import ParamGroup
from ds_ext.planner import models
from ds_ext.settings import SETTINGS, SIZES

HELP = "list all problems of a DeepSpeed config before a run"
DESCRIPTION = (
    "Checks a DeepSpeed config as a run would, and lists all problems. With --model, also shows "
    "which optimizer steps which parameters; no weights are read. The exit code is 1 if there is a "
    "problem."
)


@dataclass
class Report:
    """The result of a check."""

    problems: list[str] = field(default_factory=list)  # settings that a run would refuse or ignore
    notes: list[str] = field(default_factory=list)  # facts about the run
    unchecked: list[str] = field(default_factory=list)  # settings that need more information
    autos: list[str] = field(default_factory=list)  # keys that HF Trainer and accelerate fill in


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``check``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a DeepSpeed config (JSON)")
    parser.add_argument("--model", help="a Hugging Face folder, or a name that `plan` knows")
    parser.add_argument("--ranks", type=int, help="data-parallel ranks, to check batch sizes")


def run(options: argparse.Namespace) -> int:
    """Prints the report; returns 1 if there is a problem. ValueError for a wrong option."""
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks is {options.ranks}; allowed: a whole number > 0.")
    model = None if options.model is None else models.skeleton(models.config(options.model))
    report = examine(parsing.load(options.config), model, options.ranks)
    for note in report.notes:
        print(f"note: {note}")
    for what in report.unchecked:
        print(f"not checked: {what}")
    for problem in report.problems:
        print(f"error: {problem}")
    n = len(report.problems)
    right = "nothing is wrong" + " in what was checked" * bool(report.unchecked)
    if report.autos:
        right += (
            " for HF Trainer and accelerate; deepspeed.initialize needs numbers "
            "(python -m ds_ext config OPTIMIZER --numbers)"
        )
    print(f"{options.config}: " + (f"{n} problem{'s'[: n > 1]}" if n else right))
    return int(n > 0)


def examine(config: dict[str, Any], model: nn.Module | None, ranks: int | None) -> Report:
    """Returns the problems of a config, and what a run with it would do.

    Args:
        config: a DeepSpeed config, in which HF may have to fill in "auto".
        model: the model on the device "meta"; None to skip the checks that need it.
        ranks: the number of data-parallel ranks; None if it is not known.
    """
    report = Report()
    config, autos = parsing.filled(config)
    report.autos = autos
    if "optimizer" not in config:
        without = '; without one, the section "ds_ext" has no effect' * ("ds_ext" in config)
        report.notes.append(
            "no optimizer is named: name one of ds_ext in optimizer.type, or pass one in the "
            f"script{without}"
        )
        report.unchecked.append("an optimizer that the script passes")
    if autos:
        report.notes.append(f'"auto", which HF Trainer and accelerate fill in: {", ".join(autos)}')
    config, malformed = parsing.well_formed(config)
    known = normalized(config)
    named = _named(known, model, report)
    if "optimizer.params.lr" not in autos:
        report.notes += named.warnings
    if named.other:
        report.notes.append(
            f"optimizer.type {named.other} is DeepSpeed's or torch's own; those of ds_ext can have "
            'the prefix "ds_ext."'
        )
    else:
        report.notes += config_checks.ignored(known, named.ours)
    report.unchecked += _unchecked(known, model, ranks)
    found = malformed + config_checks.all_problems(known, named)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if has_deepspeed:
        from ds_ext.engine import deepspeed_config

        found += deepspeed_config.scheduler_problems(known)
        found += deepspeed_config.unknown(config)
    else:
        report.notes.append("DeepSpeed is not installed here: its own keys are not checked")
    found += config_checks.unread(known, named.other) if named.other else []
    if has_deepspeed and found:
        report.unchecked.append("DeepSpeed's own errors; mend the others first")
    elif has_deepspeed:
        found += deepspeed_config.raised(config, ranks)
    report.problems = found or [*config_checks.size_problems(known, ranks)]
    return report


def _named(config: dict[str, Any], model: nn.Module | None, report: Report) -> Named:
    """The optimizer that a config names; notes which optimizer steps which parameters."""
    if model is not None and "lora_" in str(lookup(config, "optimizer.params.param_groups")):
        report.unchecked.append("the names of LoRA's adapters, which only a run has")
        model = None
    view = None if model is None else ModelView(model)
    named = named_optimizer(config, view)
    if view is not None and named.ours is not None:
        report.notes += _group_notes(named.groups, type(named.ours).__name__, view)
    return named


def _unchecked(config: dict[str, Any], model: nn.Module | None, ranks: int | None) -> Iterator[str]:
    """The keys of a config that need more information than was given."""
    of_model = {
        "optimizer.params.param_groups": 'which parameters each "match" finds',
        "optimizer.params.target_modules": "which matrices it names",
    }
    for key, what in of_model.items():
        if model is None and lookup(config, key) not in (None, "all-linear"):
            yield f"{key}: {what}; give --model to check it"
    in_a_run = [k for k in SETTINGS if SETTINGS[k].only_in_run and config_checks.is_on(config, k)]
    for key in in_a_run:
        yield f"{key}: can be checked only in a run"
    if ranks is None and all(isinstance(config.get(key), int) for key in SIZES[:2]):
        yield f"{SIZES[0]}: whether it fits {SIZES[1]} and the ranks; give --ranks to check it"
    for key in config_checks.group_keys(config):
        if ranks is None and key not in in_a_run:
            yield f"{key}: whether it divides the ranks; give --ranks to check it"


def _group_notes(groups: Iterable[ParamGroup], name: str, view: ModelView) -> Iterator[str]:
    """Yields which optimizer steps which parameters."""
    kinds: dict[str, list[str]] = {}
    for group in groups:
        names = [view.owners[p][0] for p in group["params"]]
        kinds.setdefault(param_groups.described(group, name), []).extend(names)
    for kind, names in kinds.items():
        yield f"{kind} on {summary(names)}"
