"""``python -m ds_ext check``: lists all problems of a DeepSpeed config within seconds.

It uses the checks of the engine, without weights, ranks or a device. A model is made on the device
"meta".
"""

import argparse
import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_ext.backward import error_texts, int8_weights, projected_grads
from ds_ext.backward.gradient_config import CONFIG
from ds_ext.config import config_checks, parsing
from ds_ext.config.parsing import SIZES, lookup, normalized
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, named, param_groups
from ds_ext.optimizer.model_view import ModelView, at_zero, summary
from ds_ext.optimizer.param_groups import Grouped
from ds_ext.planner import lora, models
from ds_ext.rules import REGISTRY

HELP = "list all problems of a DeepSpeed config before a run"
DESCRIPTION = (
    "Checks a DeepSpeed config as a run would, and lists all problems. With --model, also shows "
    "which optimizer steps which parameters; no weights are read. The exit code is 1 if there is a "
    "problem."
)
# Values like those that HF Trainer fills in for "auto". Only their types matter here.
_FILLED = {
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
}
_DROPPED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "amp.enabled", "amp.opt_level"),
    *("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis"),
    *("fp16.min_loss_scale", "zero_optimization.reduce_bucket_size"),
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


@dataclass
class Report:
    """The result of a check."""

    problems: list[str] = field(default_factory=list)  # settings that a run would refuse or ignore
    notes: list[str] = field(default_factory=list)  # facts about the run
    unchecked: list[str] = field(default_factory=list)  # settings that need more information
    other: str | None = None  # the config's optimizer, if it is DeepSpeed's or torch's

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Records a ValueError within the context as a problem."""
        try:
            yield
        except ValueError as error:
            self.problems.append(str(error))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``check``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a DeepSpeed config (JSON)")
    parser.add_argument("--model", help="a Hugging Face folder, or a name that `plan` knows")
    parser.add_argument(
        "--lora",
        metavar="RANK",
        help="with --model: train LoRA's adapters of this rank; or the folder of PEFT's "
        "adapter_config.json",
    )
    parser.add_argument("--ranks", type=int, help="data-parallel ranks, to check batch sizes")


def run(options: argparse.Namespace) -> int:
    """Prints the report; returns 1 if there is a problem. ValueError for a wrong option."""
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks is {options.ranks}; allowed: a whole number > 0.")
    if options.lora is not None and options.model is None:
        raise ValueError("--lora needs a model: add --model.")
    model = None if options.model is None else models.skeleton(models.config(options.model))
    if model is not None and options.lora is not None:
        model = lora.adapted(model, options.lora)
    report = examine(parsing.load(options.config), model, options.ranks)
    for note in report.notes:
        print(f"note: {note}")
    for what in report.unchecked:
        print(f"not checked: {what}")
    for problem in report.problems:
        print(f"error: {problem}")
    n = len(report.problems)
    right = "nothing is wrong" + " in what was checked" * bool(report.unchecked)
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
    if all(config.get(key) is None for key in SIZES[:2]):
        report.problems.append(f"neither {SIZES[1]} nor {SIZES[0]} is set: set one of them.")
    config, autos = _filled(config)
    if autos:
        report.notes.append(f'"auto", which HF Trainer and accelerate fill in: {", ".join(autos)}')
    report.problems += parsing.malformed(config)
    ours = _optimizer(config, report)
    report.notes += config_checks.ignored(config)
    optimizer = None if ours is None else _groups(config, ours, model, report)
    if optimizer is not None:
        report.problems += _own_problems(config, optimizer)
    elif report.other is not None:
        with report.noting():
            report.problems += parsing.unread(config, report.other)
    states = [] if optimizer is None else _states(config, optimizer)
    report.unchecked += _unchecked(config, model, ranks)
    if importlib.util.find_spec("deepspeed") is None:
        report.problems += config_checks.problems(config, states=states)
        report.notes.append("DeepSpeed is not installed here: its own keys are not checked")
    else:
        from ds_ext.engine import deepspeed_config, deepspeed_versions, schedulers

        report.problems += config_checks.problems(
            config, deepspeed_versions.INSTALLED, states=states
        )
        report.problems += deepspeed_config.problems(config, ranks)
        if ours is None or optimizer is not None:
            report.problems += schedulers.problems(config, optimizer or _stand_in())
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _filled(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config with values for "auto" like those of HF, and the keys that had "auto"."""
    config, autos = copy.deepcopy(config), []
    for key in (*_FILLED, *_DROPPED):
        *path, last = key.split(".")
        section = lookup(config, ".".join(path)) if path else config
        if isinstance(section, dict) and section.get(last) == "auto":
            autos.append(key)
            del section[last]
            if key in _FILLED:
                section[last] = _FILLED[key]
    return config, autos


def _optimizer(config: dict[str, Any], report: Report) -> str | None:
    """The key of our optimizer that a config names, or None."""
    kind = lookup(config, "optimizer.type")
    if "optimizer" not in config:
        report.notes.append("no optimizer is named: the script has to give one")
    elif isinstance(kind, str):
        with report.noting():
            ours = _whose(kind)
            if ours is None:
                report.notes.append(
                    f"optimizer.type {kind} is DeepSpeed's or torch's own; those of ds_ext can "
                    f'have the prefix "ds_ext."'
                )
                report.other = kind
            return ours
    return None


def _whose(kind: str) -> str | None:
    if importlib.util.find_spec("deepspeed") is None:
        return named(kind).__name__.lower()
    from ds_ext.engine import optimizers

    return optimizers.registry_key_of_config(kind)


def _stand_in() -> torch.optim.Optimizer:
    """A stand-in for an optimizer of DeepSpeed or torch."""
    return torch.optim.AdamW([nn.Parameter(torch.empty(1, dtype=torch.float32, device="meta"))])


def _unchecked(config: dict[str, Any], model: nn.Module | None, ranks: int | None) -> Iterator[str]:
    """The keys of a config that need more information than was given."""
    config = normalized(config)
    named = {
        "optimizer.params.param_groups": 'which parameters each "match" finds',
        "optimizer.params.target_modules": "which matrices it names",
    }
    for key, what in named.items():
        if model is None and lookup(config, key) not in (None, "all-linear"):
            yield f"{key}: {what}; give --model to check it"
    for key in ("tensor_parallel.autotp_size", "expert_parallel.enabled"):
        if lookup(config, key) not in (None, 0, 1, False):
            yield f"{key}: can be checked only in a run"
    for key in config_checks.group_keys(config):
        if ranks is None:
            yield f"{key}: whether it divides the ranks; give --ranks to check it"


def _groups(
    config: dict[str, Any], ours: str, model: nn.Module | None, report: Report
) -> RuleOptimizer | None:
    """Checks the optimizer's params and groups; returns the optimizer if they are right."""
    params = config["optimizer"].get("params") or {}
    if not isinstance(params, dict):
        return None  # ``parsing.malformed`` yields it
    entry, kind = REGISTRY[ours], OPTIMIZERS[ours]
    wrong = param_groups.problems(entry, params)
    report.problems += wrong
    if wrong:
        return None
    view = None if model is None else ModelView(model)
    names = [] if model is None else [name for name, _ in model.named_parameters()]
    if "lora_" in str(params.get("param_groups")) and not any("lora_" in name for name in names):
        report.unchecked += ["the names of LoRA's adapters; add --lora RANK"] if names else []
        view = None
    optimizer = None
    with report.noting():
        if view is None:
            made = param_groups.stand_ins(entry, params)
        else:
            trained = [p for p in view.module.parameters() if p.requires_grad]
            made = param_groups.of_config(entry, params, view, trained)
        optimizer = kind(made.groups, **made.hypers)
        if view is not None:
            report.notes += [*_group_notes(made, kind.__name__, view), *_at_zero(optimizer, view)]
    return optimizer


def _states(config: dict[str, Any], optimizer: RuleOptimizer) -> list[tuple[Any, torch.dtype]]:
    """The rule of each param group, and the dtype that DeepSpeed gives the weights."""
    config = normalized(config)
    is_16 = lookup(config, "bf16.enabled") or lookup(config, "fp16.enabled")
    dtype = torch.bfloat16 if is_16 else torch.float32
    return [(optimizer.rule_of(g["params"][0]), dtype) for g in optimizer.param_groups]


def _own_problems(config: dict[str, Any], optimizer: RuleOptimizer) -> Iterator[str]:
    """Yields the settings of the section "ds_ext" that the optimizer does not support."""
    try:
        own = parsing.section(config)
    except ValueError:
        return  # ``config_checks.problems`` yields it
    shards = {p: optimizer.shard(p) for p in optimizer.group_of}
    if own.gradient_policy == "projected" and not projected_grads.projected(optimizer, shards):
        yield error_texts.not_projected(type(optimizer).__name__, CONFIG)
    if own.weight_storage:
        found = [int8_weights.refused_hypers(optimizer, p) for p in optimizer.group_of]
        if found and all(found):  # only the run knows which weights it stores
            yield str(found[0])


def _group_notes(made: Grouped, name: str, view: ModelView) -> Iterator[str]:
    """Yields which optimizer steps which parameters."""
    kinds: dict[str, list[str]] = {}
    for group in made.groups:
        names = [view.owners[p][0] for p in group["params"]]
        kinds.setdefault(param_groups.described(group, name), []).extend(names)
    for kind, names in kinds.items():
        yield f"{kind} on {summary(names)}"


def _at_zero(optimizer: RuleOptimizer, view: ModelView) -> Iterator[str]:
    """The warning of a run about adapters that would learn nothing."""
    names = [view.owners[p][0] for p in optimizer.group_of if optimizer.is_relative(p)]
    if zeros := [name for name in names if "lora_B" in name]:
        yield at_zero(type(optimizer).__name__, zeros)
