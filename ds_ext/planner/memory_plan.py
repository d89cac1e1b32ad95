"""``python -m ds_ext plan``: prints the memory of an optimizer on each rank before a run."""

import argparse
from collections.abc import Iterable, Mapping, Sequence

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory, models, muon_cost, options, plot
from ds_ext.planner.advice import advice
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import DTYPES, FSDP2, PlanOptions
from ds_ext.planner.rows import GIB, MemoryPlan

UNITS = {"GiB": GIB, "MiB": 2**20}


def run(given: argparse.Namespace) -> None:
    """Prints the plan. Raises ValueError, which names the option, if an option is invalid."""
    asked = options.read(given)
    if asked.model is None:
        print("\n".join(_largest_models(given, asked)))
        return
    plan = MemoryPlan(asked, asked.model)
    table = {row.label: plan.total(row, asked.batch) for row in plan.rows}
    unit = unit_of(row.total for row in table.values())
    if asked.picture:
        plot.draw(table, parts(asked), asked, asked.picture, title(plan), unit, UNITS[unit])
    print(f"{title(plan)}; {unit} per rank\n")
    print("\n".join(aligned(_cells(plan, table, unit))))
    print("\n" + not_counted(asked, plan.n, unit))
    if asked.picture:
        print(f"\nPicture: {asked.picture}")
    if asked.optimizer != options.ALL and asked.ranks > 1 and asked.pipeline_stages == 1:
        if any(row.optimizer is OPTIMIZERS["muon"] for row in plan.rows):
            rules = memory.rules_of(OPTIMIZERS["muon"], plan.model, asked.params)
            matrices, others = muon_cost.divided(plan.shapes, rules)
            ranks = asked.shard_size or asked.ranks
            print("\n" + muon_cost.summary(matrices, others, ranks, asked.bucket))
    print("\n" + advice(plan, table))


def parts(asked: PlanOptions) -> tuple[str, ...]:
    """Returns the names of the counted parts of memory."""
    found = ("weights", "state", "gradients", "master")
    return (*found, "activations") if asked.batch else found


def unit_of(sizes: Iterable[float]) -> str:
    """Returns the unit in which a table shows sizes in bytes."""
    return "GiB" if max(sizes) >= GIB else "MiB"


def title(plan: MemoryPlan) -> str:
    """Returns the model, dtype, ranks and batch of a plan in words."""
    asked = plan.asked
    found = f"{asked.model}: {plan.n_of_model:,} parameters in {_where(asked)}"
    if asked.pipeline_stages > 1:
        found += f" of each of {asked.pipeline_stages} stages, the largest of {plan.n:,} parameters"
    return found


def _where(asked: PlanOptions) -> str:
    """The dtype, ranks and batch of the plan in words."""
    storage = f", matrices stored in {asked.weight_storage}," if asked.weight_storage else ""
    where = f"{asked.dtype}{storage} on {asked.ranks} data-parallel rank{'s'[: asked.ranks > 1]}"
    if asked.shard_size:
        where += f", {asked.shard_size} ranks per replica for ds_ext"
    if asked.batch is None:
        return where
    rows, tokens = asked.batch.rows, asked.batch.tokens
    where += f", {rows} row{'s'[: rows > 1]} of {tokens:,} tokens each"
    where += ", checkpointing" if asked.batch.checkpointing else ""
    where += f", layers in {asked.batch.splits} pieces" if asked.batch.splits > 1 else ""
    return where + (", chunked loss" if asked.batch.chunked_loss else "")


def _cells(plan: MemoryPlan, table: Mapping[str, MemoryUse], unit: str) -> list[list[str]]:
    """The cells of the table, row by row. The last columns say which rows fit each card."""
    asked = plan.asked
    columns = (*parts(asked), "total")
    lines = [["", *columns, "bytes/param", *(f"in {card:g} GiB" for card in asked.cards)]]
    for row in plan.rows:
        held = table[row.label]
        sizes = [f"{getattr(held, part) / UNITS[unit]:.2f}" for part in columns]
        fits = []
        for card in asked.cards:
            if asked.batch is None:
                fits.append("fits" if held.total <= card * GIB else "no")
            else:
                most = plan.largest_batch(row, asked.batch, card)
                fits.append(f"batch {most}" if most else "no")
        lines.append([row.label, *sizes, f"{held.total / plan.n:.2f}", *fits])
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yields the lines of a table whose first row is its heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield f"{label:<{widths[0]}}  " + "  ".join(aligned)


def not_counted(asked: PlanOptions, n: int, unit: str) -> str:
    """Returns the text below the table: what is not counted, and the meaning of columns."""
    live = min(n, 10**9) * DTYPES[asked.dtype].itemsize / UNITS[unit]
    text = (
        "Not counted: the weights that ZeRO-3 gathers for computing, up to "
        f"{live:.2f} {unit} (stage3_max_live_parameters,\n10^9 by default). Gradients are the "
        f"peak with buckets of {asked.bucket:,} elements\n(--bucket), also for AdamW. "
    )
    if asked.weight_storage:
        text += "They include the matrices that exist in bf16 at a\ntime. "
    if asked.stage == FSDP2:
        text += (
            "FSDP2 gathers two layers, and embedding and head\nall the time, not counted either. "
        )
    if asked.batch is None:
        return text + "Activations are not counted: --seq TOKENS counts them."
    return text + (
        "Activations are what they add to the peak, by a forward and a\nbackward pass of the model "
        "on tensors without storage, with fused attention."
    )


def _largest_models(given: argparse.Namespace, asked: PlanOptions) -> list[str]:
    """The lines of a table: the largest model of ``models.KNOWN`` that fits each card."""
    columns = []
    for card in asked.cards:  # each has buckets of its own size
        one = options.read(argparse.Namespace(**vars(given) | {"memory": (card,)}))
        columns.append(_largest_by_label(one, card * GIB))
    lines = [["", *(f"in {card:g} GiB" for card in asked.cards)]]
    lines += [[label, *(column[label] for column in columns)] for label in columns[0]]
    heading = f"The largest known model that fits, in {_where(asked)}"
    return [heading, "", *aligned(lines), "", not_counted(asked, 10**9, "GiB")]


def _largest_by_label(asked: PlanOptions, available: float) -> dict[str, str]:
    """The name of the largest model that fits the available bytes, for each row of a plan."""
    found: dict[str, str] = {}
    for plan in sorted((MemoryPlan(asked, k) for k in models.KNOWN), key=lambda plan: plan.n):
        for row in plan.rows:
            found.setdefault(row.label, "none")
            if (
                row.without_activations.total <= available
                and plan.total(row, asked.batch).total <= available
            ):
                found[row.label] = plan.name
    return found
