"""``python -m ds_ext plan``: prints a plan of memory, or writes a config that fits (``--fit``)."""

import argparse
import itertools
from pathlib import Path

from ds_ext.commands import config
from ds_ext.planner import fit, memory_plan, options

HELP = "print the bytes per rank of an optimizer, of AdamW and of Megatron-LM"
DESCRIPTION = (
    "Prints the bytes per rank of an optimizer at each ZeRO stage, of AdamW in DeepSpeed and of "
    "Megatron-LM's distributed optimizer; with --seq, also of activations. With --fit, writes a "
    "DeepSpeed config that fits."
)

add_options = options.add_options


def run(given: argparse.Namespace) -> None:
    """Prints the plan. Raises ValueError, which names the option, if an option is invalid."""
    if given.fit is None:
        memory_plan.run(given)
    else:
        _fit(given, given.fit)


def _fit(given: argparse.Namespace, path: Path) -> None:
    """Prints the steps to a config that fits, and writes it."""
    asked = options.read(given)
    fit.check(given, asked)
    if path.exists():
        raise ValueError(f"--fit {path}: the file exists: give another name.")
    made, taken = fit.cheapest_reductions(given, asked)
    last, unit = taken[-1].asked, memory_plan.unit_of(step.use.total for step in taken)
    totals = [step.use.total / memory_plan.UNITS[unit] for step in taken]
    lines = [["", "total", "saves"], [taken[0].name, f"{totals[0]:.2f}", "-"]]
    for step, (before, total) in zip(taken[1:], itertools.pairwise(totals), strict=True):
        lines.append([f"{step.name} ({step.cost})", f"{total:.2f}", f"{before - total:.2f}"])
    try:
        path.write_text(config.as_text(config.of_plan(last)), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--fit {path}: {error.strerror}") from None
    print(f"{memory_plan.title(made)}; {unit} per rank\n")
    print("\n".join(memory_plan.aligned(lines)))
    print("\n" + memory_plan.not_counted(last, made.n, unit))
    print(f"\nThe counted memory fits in {last.cards[0]:g} GiB. Config: {path}")
    if given.checkpointing:
        print("The program must enable activation checkpointing, as the plan assumes.")
    if last.accumulates:
        print("Set gradient_accumulation_steps in it, now 1. The plan is the same for any number.")
