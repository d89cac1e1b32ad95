"""Prints a plan of memory as a table, and draws it as stacked bars."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.memory_plan import GIB, MemoryPlan
from ds_ext.planner.options import DTYPES, PlanOptions

UNITS = {"GiB": GIB, "MiB": 2**20}


def show(options: PlanOptions) -> None:
    """Prints the plan, and draws it if ``--plot`` is given."""
    plan = MemoryPlan(options)
    table = {label: plan.total(use, options.batch) for label, use in plan.rows.items()}
    unit = unit_of(use.total for use in table.values())
    if options.picture is not None:
        _draw(plan, table, unit, options.picture)
    print(f"{title(plan)}; {unit} per rank\n")
    cells = _cells(plan, table, unit)
    print("\n".join(aligned(cells)))
    fits = [cell for line in cells[1:] for cell in line[len(line) - len(options.cards) :]]
    if {*fits} == {"no"}:
        print(
            "\nNothing fits as it is. With --seq TOKENS and one size in --memory, --fit FILE takes "
            "the steps\nthat save memory, and writes a config."
        )
    print("\n" + not_counted(options, plan.n, unit))
    if options.picture:
        print(f"\nPicture: {options.picture}")


def unit_of(sizes: Iterable[float]) -> str:
    """Returns the unit in which a table shows sizes in bytes."""
    return "GiB" if max(sizes) >= GIB else "MiB"


def title(plan: MemoryPlan) -> str:
    """Returns the model, dtype, ranks and batch of a plan in words."""
    options, own, batch = plan.options, plan.options.own, plan.options.batch
    where = f"{options.model}: {plan.n:,} parameters in {options.dtype}"
    where += f", matrices stored in {own.weight_storage}," if own.weight_storage else ""
    where += f" on {options.ranks} data-parallel rank{'s'[: options.ranks > 1]}"
    if batch is None:
        return where
    where += f", {batch.rows} row{'s'[: batch.rows > 1]} of {batch.tokens:,} tokens each"
    where += ", checkpointing" if batch.checkpointing else ""
    where += f", layers in {batch.splits} pieces" if batch.splits > 1 else ""
    return where + (", chunked loss" if batch.chunked_loss else "")


def _parts(options: PlanOptions) -> tuple[str, ...]:
    """The names of the counted parts of memory."""
    found = ("weights", "state", "gradients", "master")
    return (*found, "activations") if options.batch else found


def _cells(plan: MemoryPlan, table: Mapping[str, MemoryUse], unit: str) -> list[list[str]]:
    """The cells of the table, row by row. The last columns say which rows fit each card."""
    options, size = plan.options, UNITS[unit]
    columns = (*_parts(options), "total")
    on_host = ["on the host"] if any(use.host for use in table.values()) else []
    cards = [f"in {card:g} GiB" for card in options.cards]
    lines = [["", *columns, "bytes/param", *on_host, *cards]]
    for label, use in table.items():
        fits = []
        for card in options.cards:
            if options.batch is None:
                fits.append("fits" if use.total <= card * GIB else "no")
            else:
                most = plan.largest_batch(plan.rows[label], options.batch, card)
                fits.append(f"batch {most}" if most else "no")
        sizes = [f"{getattr(use, part) / size:.2f}" for part in columns]
        host = [f"{use.host / size:.2f}" for _ in on_host]
        lines.append([label, *sizes, f"{use.total / plan.n:.2f}", *host, *fits])
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
    gathers = 3 in options.stages and (options.ranks > 1 or options.offloads("param"))
    gathered = (
        f"the weights that ZeRO-3 gathers for computing, up to {live:.2f} {unit} "
        "(stage3_max_live_parameters, 10^9 by default); "
    )
    sentences = [
        f"Not counted: {gathered * gathers}clipping to a norm, for which ds_ext runs backward "
        "twice and keeps activations until the second time.",
        f"Gradients are the peak with buckets of {options.bucket:,} elements (--bucket), also for "
        "AdamW.",
    ]
    if options.own.weight_storage:
        sentences.append("They include the matrices that exist in bf16 at a time.")
    if options.batch is None:
        sentences.append("Activations are not counted: --seq TOKENS counts them.")
    else:
        sentences.append(
            "Activations are what they add to the peak, by a forward and a backward pass of the "
            "model on tensors without storage, with fused attention."
        )
    return textwrap.fill(" ".join(sentences), 90)


def _draw(plan: MemoryPlan, table: Mapping[str, MemoryUse], unit: str, path: Path) -> None:
    """Draws the table as stacked bars, with a line for each card. ValueError if it cannot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install ds-ext[plot]).") from None
    options, size, parts = plan.options, UNITS[unit], _parts(plan.options)
    figure = Figure(figsize=(9, 1.4 + 0.32 * len(table)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(table)
    for part in parts:
        sizes = [getattr(use, part) / size for use in table.values()]
        axes.barh(list(table), sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, total in enumerate(left):
        axes.annotate(f"{total:.1f}", (total, i), (3, 0), textcoords="offset points", va="center")
    for card in options.cards:
        edge = card * GIB / size
        if edge < 1.05 * max(left):
            axes.axvline(edge, color="black", linestyle=":")
            axes.annotate(f" {card:g} GiB", (edge, -0.6), va="bottom", annotation_clip=False)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=f"{unit} per rank{'' if options.batch else ', without activations'}")
    figure.suptitle(textwrap.fill(title(plan), 90), fontsize="medium", x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ValueError(f"--plot {path}: {error}") from None
