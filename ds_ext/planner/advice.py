"""The advice at the end of a plan about which optimizer to use."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.rows import GIB, MemoryPlan, Row
from ds_ext.rates import advice as rate

MOST_RANKS = 1024


def advice(plan: MemoryPlan, table: Mapping[str, MemoryUse]) -> str:
    """Returns advice for each card: AdamW if it fits, else an optimizer with less memory.

    Args:
        plan: the plan that the table shows.
        table: the memory of each row, by label.
    """
    asked = plan.asked
    theirs = next(row for row in plan.rows if row.label.startswith("AdamW, DeepSpeed"))
    ours = [row for row in plan.rows if row.optimizer is not None]
    flash = next((row for row in ours if row.optimizer is OPTIMIZERS["flashadamw"]), None)
    least = min(ours, key=lambda row: table[row.label].total)
    candidates = [theirs, *([flash] if flash else []), least]

    def size(row: Row) -> str:
        return f"{table[row.label].total / GIB:.2f} GiB"

    if not asked.cards:
        named = ", ".join(f"{row.label} {size(row)}" for row in reversed(candidates))
        rates = "; ".join(f"{row.label.partition(',')[0]} {_rate(row)}" for row in candidates[1:])
        return f"Per rank: {named}. --memory 24,80 shows what fits.\nLearning rates: {rates}."
    lines = []
    for card in asked.cards:
        row = next((c for c in candidates if table[c.label].total <= card * GIB), None)
        if row is None:
            lines.append(_more(plan, least, card))
        else:
            lines.append(f"{card:g} GiB: {_take(row, candidates)} Learning rate: {_rate(row)}.")
    return "\n".join(lines)


def _rate(row: Row) -> str:
    """Advice for the learning rate: "start at 1e-3, try 5e-4 and 2e-3"."""
    return rate(row.optimizer.__name__ if row.optimizer else "AdamW") or "as its paper says"


def _take(row: Row, candidates: Sequence[Row]) -> str:
    if row is candidates[0]:
        return (
            f"DeepSpeed's AdamW fits ({row.label}). Use a smaller optimizer only to free memory "
            "for larger batches."
        )
    if row is not candidates[-1]:
        return f"{row.label} makes AdamW's steps in less memory, and fits."
    return f"{row.label}, which needs the least memory, fits."


def _more(plan: MemoryPlan, least: Row, card: float) -> str:
    """Advice if no optimizer fits."""
    asked, ranks = plan.asked, plan.asked.ranks
    while ranks < MOST_RANKS:
        ranks *= 2
        more = plan.changed(replace(asked, ranks=ranks, shard_size=0))
        row = next(row for row in more.rows if row.label == least.label)
        if more.total(row, asked.batch).total <= card * GIB:
            return f"{card:g} GiB: nothing fits; {least.label} would on {ranks} ranks."
    hints = []
    if asked.batch is not None:
        hints += [] if asked.batch.checkpointing else ["--checkpointing"]
        hints += ["fewer --batch rows"] if asked.batch.rows > 1 else ["shorter rows (--seq)"]
    if asked.stage != "3":
        hints.append("--stage 3")
    elif not asked.offload_param:
        hints.append("--offload-param")
    return f"{card:g} GiB: nothing fits on {MOST_RANKS} ranks either; try {', '.join(hints)}."
