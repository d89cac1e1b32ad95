"""``python -m ds_ext check``: lists all problems of a DeepSpeed config within seconds.

It calls the functions by which a run reads its config, without weights, ranks or a device. A model
is made on the device "meta".
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from ds_ext.backward import startup_log
from ds_ext.config import config_checks, parsing
from ds_ext.config.parsing import lookup
from ds_ext.optimizer import param_groups
from ds_ext.optimizer.model_view import model_view
from ds_ext.planner import models
from ds_ext.planner.options import positive
from ds_ext.settings import SETTINGS, SIZES

DESCRIPTION = (
    "Checks a DeepSpeed config as a run would, and lists all problems. With --model, also shows "
    "which optimizer steps which parameters; no weights are read. The exit code is 1 if there is a "
    "problem."
)
# The lines of a report, by their kind.
NOTE, UNCHECKED, ERROR = "note", "not checked", "error"
_RATES = {"optimizer.params.lr", "scheduler.params.warmup_max_lr"}
_STAGE = "zero_optimization.stage"
Report: TypeAlias = dict[str, list[str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``check``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a DeepSpeed config (JSON)")
    parser.add_argument("--model", help="a Hugging Face folder, or a name that `plan` knows")
    what = "data-parallel ranks, to check batch sizes"
    parser.add_argument("--ranks", type=positive, help=what)


def run(options: argparse.Namespace) -> int:
    """Prints the report; returns 1 if there is a problem. ValueError for a wrong option."""
    model = None if options.model is None else models.skeleton(models.config(options.model))
    given = parsing.load(options.config)
    report, autos = examine(given, model, options.ranks), parsing.filled(given)[1]
    try:
        json.loads(options.config.read_text(encoding="utf-8"))
    except ValueError as error:
        line = f"it is not strict JSON, which HF Trainer and accelerate read: {error}"
        report[ERROR if autos else NOTE].append(line)
    for kind, lines in report.items():
        for line in lines:
            print(f"{kind}: {line}")
    n = len(report[ERROR])
    right = "nothing is wrong" + " in what was checked" * bool(report[UNCHECKED])
    if any(key == _STAGE or not key.startswith("zero_optimization.") for key in autos):
        right += (
            " for HF Trainer and accelerate; deepspeed.initialize needs numbers "
            "(python -m ds_ext config OPTIMIZER --numbers)"
        )
    print(f"{options.config}: " + (f"{n} problem{'s'[: n > 1]}" if n else right))
    return int(n > 0)


def examine(config: dict[str, Any], model: nn.Module | None, ranks: int | None) -> Report:
    """Returns the problems of a config, in which HF may fill in "auto", and facts about a run.

    Args:
        config: a DeepSpeed config.
        model: the model on the device "meta"; None to skip the checks that need it.
        ranks: the number of data-parallel ranks; None if it is not known.
    """
    notes, unchecked = list[str](), list[str]()
    config, autos = parsing.filled(config)
    if "optimizer" not in config:
        without = '. Without one, a run refuses the section "ds_ext"' * ("ds_ext" in config)
        notes.append(
            "no optimizer is named: name one of ds_ext in optimizer.type, or pass one in the "
            f"script{without}"
        )
        unchecked.append("an optimizer that the script passes")
    if autos:
        notes.append(f'"auto", which HF Trainer and accelerate fill in: {", ".join(autos)}')
    if model is not None and "lora_" in str(lookup(config, "optimizer.params.param_groups")):
        unchecked.append("the names of LoRA's adapters, which only a run has")
        model = None
    view = None if model is None else model_view(model)
    read = config_checks.read(config, view)
    if view is not None and read.ours is not None:
        names = {p: info.name for p, info in view.items()}
        notes += param_groups.described(read.groups, type(read.ours).__name__, names)
    if read.ours is not None and "optimizer.params.lr" not in autos:
        notes += startup_log.unusual_rates(read.ours)
    found = read.problems
    if left := parsing.never_filled(config):
        (found if autos else notes).append(
            f'"auto", which nobody fills in: {", ".join(left)}. HF Trainer and accelerate refuse '
            "it; deepspeed.initialize uses its defaults."
        )
    if read.other:
        found += config_checks.unread(read.values, read.other)
        notes.append(
            f"optimizer.type {read.other} is DeepSpeed's or torch's own; those of ds_ext can have "
            'the prefix "ds_ext."'
        )
        scatters = lookup(read.values, "zero_optimization.reduce_scatter", True)
        if read.other.lower() == "muon" and scatters and lookup(read.values, _STAGE) == 3:
            found.append(
                "optimizer.type Muon is DeepSpeed's, which raises an error at stage 3 unless "
                'zero_optimization.reduce_scatter is false. For ds_ext\'s, write "ds_ext.Muon".'
            )
    else:
        notes += config_checks.ignored(read.values, read.ours)
    unchecked += _unchecked(read.values, model, ranks)
    if importlib.util.find_spec("deepspeed") is None:
        notes.append("DeepSpeed is not installed here: its own keys are not checked")
    else:
        from ds_ext.engine import deepspeed_config

        found += deepspeed_config.scheduler_problems(read.values, read.ours)
        if read.ours is not None and _RATES.isdisjoint(autos):
            lrs = [group["lr"] for group in read.ours.param_groups]
            notes += deepspeed_config.replaced_rates(read.values, lrs)
        found += deepspeed_config.unknown(config)
        if found:
            unchecked.append("DeepSpeed's own errors; mend those below first")
        found = found or [*deepspeed_config.raised(config, ranks)]
    found = found or [*config_checks.size_problems(read.values, ranks)]
    return {NOTE: notes, UNCHECKED: unchecked, ERROR: found}


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
    if lookup(config, "ds_ext.weight_storage") == "int8" and not lookup(config, "bf16.enabled"):
        yield 'ds_ext.weight_storage: whether the weights are bf16; "bf16": {"enabled": true} casts'
    if ranks is None and all(isinstance(config.get(key), int) for key in SIZES[:2]):
        yield f"{SIZES[0]}: whether it fits {SIZES[1]} and the ranks; give --ranks to check it"
    for key in config_checks.group_keys(config):
        if ranks is None and key not in in_a_run:
            yield f"{key}: whether it divides the ranks; give --ranks to check it"
