"""The advice at the end of a plan about which optimizer to use."""

from collections.abc import Mapping
from dataclasses import replace

from ds_ext import rates
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import fit
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.rows import GIB, MemoryPlan, Row


def advice(plan: MemoryPlan, table: Mapping[str, MemoryUse]) -> str:
    """Returns advice for each card: the first optimizer that fits of AdamW and smaller ones.

    LOMO needs a little less memory than AdaLomo, and was behind in every measurement. It is
    recommended only if nothing else fits.

    Args:
        plan: the plan that the table shows.
        table: the memory of each row, by label.
    """
    theirs = next(row for row in plan.rows if row.label.startswith("AdamW, DeepSpeed"))
    ours = [row for row in plan.rows if row.optimizer is not None]
    ours = sorted(ours, key=lambda row: table[row.label].total)
    wanted = [OPTIMIZERS["flashadamw"], OPTIMIZERS["adalomo"], ours[0].optimizer]
    smallest = [next((row for row in ours if row.optimizer is kind), None) for kind in wanted]
    candidates = [theirs, *dict.fromkeys(row for row in smallest if row is not None)]
    if not plan.options.cards:
        sizes = [f"{c.label} {table[c.label].total / GIB:.2f} GiB" for c in reversed(candidates)]
        found = "; ".join(f"{c.label.partition(',')[0]} {_rate(plan, c)}" for c in candidates[1:])
        return (
            f"Per rank: {', '.join(sizes)}. --memory 24,80 shows what fits.\n"
            f"Learning rates: {found}."
        )
    lines = []
    for card in plan.options.cards:
        row = next((c for c in candidates if table[c.label].total <= card * GIB), None)
        if row is None:
            lines.append(f"{card:g} GiB: {_smaller(plan, card)}")
        else:
            lines.append(f"{card:g} GiB: {_take(row)} Learning rate: {_rate(plan, row)}.")
    return "\n".join(lines)


def _rate(plan: MemoryPlan, row: Row) -> str:
    """The learning rate to start at, and whose it is."""
    name = row.optimizer.__name__ if row.optimizer else "AdamW"
    found = rates.for_size(name, plan.n)
    return f"start at {rates.shown(found[0])} ({found[1]})" if found else "as its paper says"


def _take(row: Row) -> str:
    if row.optimizer is None:
        return (
            f"DeepSpeed's AdamW fits ({row.label}). Use a smaller optimizer only to free memory "
            "for larger batches."
        )
    if row.optimizer is OPTIMIZERS["flashadamw"]:
        return f"{row.label} makes AdamW's steps in less memory, and fits."
    return f"{row.label} fits."


def _smaller(plan: MemoryPlan, card: float) -> str:
    """Advice if no optimizer fits: what ``--fit`` would do."""
    options = replace(plan.options, cards=(card,))
    if fit.unsupported(options) is None:
        try:
            _, taken = fit.cheapest_reductions(options, plan)
        except ValueError:  # nothing fits on this number of ranks
            pass
        else:
            steps = ", ".join(step.name for step in taken[1:])
            size = f"{taken[-1].use.total / GIB:.2f} GiB"
            return f"nothing fits as it is; {size} are enough with {steps} (--fit writes a config)."
    return (
        "nothing fits; give more --ranks, a smaller --model, or fewer and shorter rows (--batch, "
        "--seq), or offload (--fit tries it)."
    )
