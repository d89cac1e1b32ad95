"""Prints a plan of memory as a table, and draws it as stacked bars."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.memory_plan import GIB, MemoryPlan
from ds_ext.planner.options import DTYPES, PlanOptions

UNITS = {"GiB": GIB, "MiB": 2**20}


def show(options: PlanOptions) -> None:
    """Prints the plan, and draws it if ``--plot`` is given."""
    plan = MemoryPlan(options)
    rows = plan.rows(options)
    table = {label: plan.total(use, options.batch) for label, use in rows.items()}
    unit = unit_of(use.total for use in table.values())
    if options.picture is not None:
        _draw(options, plan.n, table, unit)
    print(f"{title(options, plan.n)}; {unit} per rank\n")
    fits = {label: _fits(plan, options, use) for label, use in rows.items()}
    print("\n".join(aligned(_cells(options, plan.n, table, unit, fits))))
    if {cell for cells in fits.values() for cell in cells} == {"no"}:
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


def title(options: PlanOptions, n: int) -> str:
    """Returns the model of ``n`` parameters, dtype, ranks and batch of a plan in words."""
    own, batch = options.own, options.batch
    where = f"{options.model}: {n:,} parameters in {options.dtype}"
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


def _fits(plan: MemoryPlan, options: PlanOptions, use: MemoryUse) -> list[str]:
    """Whether a row, without activations, fits each card; with a batch, the largest that does."""
    if options.batch is None:
        return ["fits" if use.total <= card * GIB else "no" for card in options.cards]
    most = [plan.largest_batch(use, options.batch, card) for card in options.cards]
    return [f"batch {rows}" if rows else "no" for rows in most]


def _cells(
    options: PlanOptions,
    n: int,
    table: Mapping[str, MemoryUse],
    unit: str,
    fits: Mapping[str, Sequence[str]],
) -> list[list[str]]:
    """The cells of the table, row by row. The last columns are ``fits``."""
    columns = (*_parts(options), "total")
    on_host = ["on the host"] if any(use.host for use in table.values()) else []
    cards = [f"in {card:g} GiB" for card in options.cards]
    lines = [["", *columns, "bytes/param", *on_host, *cards]]
    for label, use in table.items():
        sizes = [f"{getattr(use, part) / UNITS[unit]:.2f}" for part in columns]
        host = [f"{use.host / UNITS[unit]:.2f}" for _ in on_host]
        lines.append([label, *sizes, f"{use.total / n:.2f}", *host, *fits[label]])
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
    gathered = ""
    if 3 in options.stages and (options.ranks > 1 or "param" in options.offloads):
        gathered = f"the weights that ZeRO-3 gathers for computing, up to {live:.2f} {unit} "
        gathered += "(stage3_max_live_parameters, 10^9 by default); "
    sentences = [
        f"Not counted: {gathered}clipping to a norm, for which ds_ext runs backward "
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


def _draw(options: PlanOptions, n: int, table: Mapping[str, MemoryUse], unit: str) -> None:
    """Draws the table as stacked bars, with a line for each card. ValueError if it cannot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install ds-ext[plot]).") from None
    size, parts = UNITS[unit], _parts(options)
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
    figure.suptitle(textwrap.fill(title(options, n), 90), fontsize="medium", x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
    try:
        figure.savefig(str(options.picture), dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ValueError(f"--plot {options.picture}: {error}") from None
