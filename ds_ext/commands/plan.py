"""``python -m ds_ext plan``: prints a plan of memory, or writes a config that fits (``--fit``)."""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from ds_ext.commands import check, config
from ds_ext.config import parsing
from ds_ext.errors import raise_all
from ds_ext.planner import fit, table
from ds_ext.planner.options import PlanOptions, read
from ds_ext.planner.options import add_options as add_options
from ds_ext.settings import SIZES

DESCRIPTION = (
    "Prints the bytes per rank of an optimizer and of DeepSpeed's AdamW at each ZeRO stage; with "
    "--seq, also of activations. With --fit, writes a DeepSpeed config that fits."
)


def run(given: argparse.Namespace) -> None:
    """Prints the plan. Raises ValueError, which names the option, if an option is invalid."""
    options = read(given, _checked(given.config, given.ranks) if given.config else None)
    if given.fit is None:
        table.show(options)
    else:
        _fit(given, given.fit, options)


def _checked(path: Path, ranks: int) -> dict[str, Any]:
    """The config of a file. Raises ValueError with the first problem that ``check`` finds."""
    try:
        config: dict[str, Any] = parsing.load(path)
        batch = {} if SIZES[0] in config else {SIZES[1]: 1}  # --batch may set it
        raise_all(check.examine(batch | config, None, ranks)[check.ERROR])
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    return config


def _fit(given: argparse.Namespace, path: Path, options: PlanOptions) -> None:
    """Prints the steps to a config that fits, and writes it."""
    fit.check(options)
    if path.exists():
        raise ValueError(f"--fit {path}: the file exists: give another name.")
    plan, taken = fit.cheapest_reductions(options)
    last, unit = taken[-1].options, table.unit_of(step.use.total for step in taken)
    totals = [step.use.total / table.UNITS[unit] for step in taken]
    lines = [["", "total", "saves"], [taken[0].step.name, f"{totals[0]:.2f}", "-"]]
    for use, (before, total) in zip(taken[1:], itertools.pairwise(totals), strict=True):
        name = f"{use.step.name} ({use.step.cost})"
        lines.append([name, f"{total:.2f}", f"{before - total:.2f}"])
    written = config.of_plan(last, plan.n, numbers=not given.hf)
    try:
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--fit {path}: {error.strerror}") from None
    print(f"{table.title(taken[0].options, plan.n)}; {unit} per rank\n")
    print("\n".join(table.aligned(lines)))
    if on_host := taken[-1].use.host / table.UNITS[unit]:
        print(f"\nIn the memory of the host: {on_host:.2f} {unit} per rank.")
    print("\n" + table.not_counted(last, plan.n, unit))
    used = taken[-1].use.total / table.UNITS[unit]
    print(
        f"\nThe counted memory is {used:.2f} {unit} of {last.cards[0]:g} GiB; what is not counted "
        f"has the rest. If that needs more, give a smaller --memory. Config: {path}"
    )
    if last.own.batch_splits > 1 and last.batch is not None and last.batch.rows == 1:
        print('"batch_splits" in it means checkpointing: a row is not split, and layers run again.')
    print(config.rate_source(last.optimizers[0].__name__, plan.n))
    if given.hf:
        arguments = config.trainer_arguments(last, plan.n)
        print(f'HF Trainer and TRL fill in "auto" from: --deepspeed {path} {arguments}')
    else:
        print("It is for deepspeed.initialize: --hf writes one for HF Trainer and TRL.")
    if given.checkpointing:
        print("The program must enable activation checkpointing, as the plan assumes.")
    if last.accumulates:
        in_it = "Set gradient_accumulation_steps in it, now 1"
        what = "Give --gradient_accumulation_steps" if given.hf else in_it
        print(f"{what}. The plan is the same for any number.")
