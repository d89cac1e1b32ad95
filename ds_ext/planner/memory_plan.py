"""``python -m ds_ext plan``: prints the memory of an optimizer on each rank before a run."""

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ds_ext.planner import models, plot
from ds_ext.planner.advice import advice
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import DTYPES, PlanOptions, read
from ds_ext.planner.rows import GIB, MemoryPlan

UNITS = {"GiB": GIB, "MiB": 2**20}


def run(given: argparse.Namespace) -> None:
    """Prints the plan. Raises ValueError, which names the option, if an option is invalid."""
    options = read(given)
    if options.model is None:
        print("\n".join(_largest_models(given, options)))
        return
    plan = MemoryPlan(options, options.model)
    table = {row.label: plan.total(row, options.batch) for row in plan.rows}
    unit = unit_of(row.total for row in table.values())
    if options.picture:
        plot.draw(table, parts(options), options, options.picture, title(plan), unit, UNITS[unit])
    print(f"{title(plan)}; {unit} per rank\n")
    print("\n".join(aligned(_cells(plan, table, unit))))
    print("\n" + not_counted(options, plan.n, unit))
    if options.picture:
        print(f"\nPicture: {options.picture}")
    print("\n" + advice(plan, table))


def parts(options: PlanOptions) -> tuple[str, ...]:
    """Returns the names of the counted parts of memory."""
    found = ("weights", "state", "gradients", "master")
    return (*found, "activations") if options.batch else found


def unit_of(sizes: Iterable[float]) -> str:
    """Returns the unit in which a table shows sizes in bytes."""
    return "GiB" if max(sizes) >= GIB else "MiB"


def title(plan: MemoryPlan) -> str:
    """Returns the model, dtype, ranks and batch of a plan in words."""
    options = plan.options
    return f"{options.model}: {plan.n:,} parameters in {_where(options)}"


def _where(options: PlanOptions) -> str:
    """The dtype, ranks and batch of the plan in words."""
    storage = f", matrices stored in {options.weight_storage}," if options.weight_storage else ""
    where = (
        f"{options.dtype}{storage} on {options.ranks} data-parallel rank{'s'[: options.ranks > 1]}"
    )
    if options.shard_size:
        where += f", {options.shard_size} ranks per replica for ds_ext"
    if options.batch is None:
        return where
    rows, tokens = options.batch.rows, options.batch.tokens
    where += f", {rows} row{'s'[: rows > 1]} of {tokens:,} tokens each"
    where += ", checkpointing" if options.batch.checkpointing else ""
    where += f", layers in {options.batch.splits} pieces" if options.batch.splits > 1 else ""
    return where + (", chunked loss" if options.batch.chunked_loss else "")


def _cells(plan: MemoryPlan, table: Mapping[str, MemoryUse], unit: str) -> list[list[str]]:
    """The cells of the table, row by row. The last columns say which rows fit each card."""
    options = plan.options
    columns = (*parts(options), "total")
    has_host = any(row.host_bytes for row in plan.rows)
    cards = [f"in {card:g} GiB" for card in options.cards]
    lines = [["", *columns, "bytes/param", *(["on the host"] if has_host else []), *cards]]
    for row in plan.rows:
        held = table[row.label]
        sizes = [f"{getattr(held, part) / UNITS[unit]:.2f}" for part in columns]
        fits = []
        for card in options.cards:
            if options.batch is None:
                fits.append("fits" if held.total <= card * GIB else "no")
            else:
                most = plan.largest_batch(row, options.batch, card)
                fits.append(f"batch {most}" if most else "no")
        on_host = [f"{row.host_bytes / UNITS[unit]:.2f}"] if has_host else []
        lines.append([row.label, *sizes, f"{held.total / plan.n:.2f}", *on_host, *fits])
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yields the lines of a table whose first row is its heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield f"{label:<{widths[0]}}  " + "  ".join(aligned)


def not_counted(options: PlanOptions, n: int, unit: str) -> str:
    """Returns the text below the table: what is not counted, and the meaning of columns."""
    live = min(n, 10**9) * DTYPES[options.dtype].itemsize / UNITS[unit]
    sentences = [
        "Not counted: the weights that ZeRO-3 gathers for computing, up to "
        f"{live:.2f} {unit} (stage3_max_live_parameters, 10^9 by default); clipping to a norm, for "
        "which ds_ext runs backward twice and keeps activations until the second time.",
        f"Gradients are the peak with buckets of {options.bucket:,} elements (--bucket), also for "
        "AdamW.",
    ]
    if options.weight_storage:
        sentences.append("They include the matrices that exist in bf16 at a time.")
    if options.batch is None:
        sentences.append("Activations are not counted: --seq TOKENS counts them.")
    else:
        sentences.append(
            "Activations are what they add to the peak, by a forward and a backward pass of the "
            "model on tensors without storage, with fused attention."
        )
    return textwrap.fill(" ".join(sentences), 90)


def _largest_models(given: argparse.Namespace, options: PlanOptions) -> list[str]:
    """The lines of a table: the largest model of ``models.KNOWN`` that fits each card."""
    columns = []
    for card in options.cards:  # each has buckets of its own size
        one = read(argparse.Namespace(**vars(given) | {"memory": (card,)}))
        columns.append(_largest_by_label(one, card * GIB))
    lines = [["", *(f"in {card:g} GiB" for card in options.cards)]]
    lines += [[label, *(column[label] for column in columns)] for label in columns[0]]
    heading = f"The largest known model that fits, in {_where(options)}"
    return [heading, "", *aligned(lines), "", not_counted(options, 10**9, "GiB")]


def _largest_by_label(options: PlanOptions, available: float) -> dict[str, str]:
    """The name of the largest model that fits the available bytes, for each row of a plan."""
    found: dict[str, str] = {}
    for plan in sorted((MemoryPlan(options, k) for k in models.KNOWN), key=lambda plan: plan.n):
        for row in plan.rows:
            found.setdefault(row.label, "none")
            if (
                row.without_activations.total <= available
                and plan.total(row, options.batch).total <= available
            ):
                found[row.label] = plan.name
    return found
