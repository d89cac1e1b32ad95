"""Draws a plan as stacked bars, with a line for the memory of each card."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import PlanOptions


def draw(
    table: Mapping[str, MemoryUse],
    parts: Sequence[str],
    options: PlanOptions,
    path: Path,
    title: str,
    unit: str,
    size: float,
) -> None:
    """Draws the table.

    Args:
        table: the memory of each row, by label.
        parts: the parts of memory, in the order of the stack.
        options: the options; draws a line for each of ``options.cards``.
        path: the file to write.
        title: the title.
        unit: the name of the axis' unit.
        size: the number of bytes in the unit.

    Raises:
        ValueError: the file cannot be written, or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install ds-ext[plot]).") from None
    figure = Figure(figsize=(9, 1.4 + 0.32 * len(table)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(table)
    for part in parts:
        sizes = [getattr(row, part) / size for row in table.values()]
        axes.barh(list(table), sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, total in enumerate(left):
        axes.annotate(f"{total:.1f}", (total, i), (3, 0), textcoords="offset points", va="center")
    for card in options.cards:
        edge = card * 2**30 / size
        if edge < 1.05 * max(left):
            axes.axvline(edge, color="black", linestyle=":")
            axes.annotate(f" {card:g} GiB", (edge, -0.6), va="bottom", annotation_clip=False)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    counted = "" if options.batch else ", without activations"
    axes.set(xlabel=f"{unit} per rank{counted}")
    figure.suptitle(textwrap.fill(title, 90), fontsize="medium", x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ValueError(f"--plot {path}: {error}") from None
