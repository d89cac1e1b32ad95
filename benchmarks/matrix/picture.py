"""Plots loss over learning rate: a panel per data set or size, and a line per candidate."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.matrix.lines import Line, loss_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osv^D<>pP*Xhd"


def sensitivity(
    figure: "Figure", panels: Mapping[str, Sequence[Line]], labels: Mapping[str, str]
) -> None:
    """Draws the runs of the first seed.

    Args:
        figure: the figure to draw into.
        panels: the runs of each panel by its title; at least one.
        labels: the label of each candidate.
    """
    from matplotlib import colormaps

    there = {line["candidate"] for lines in panels.values() for line in lines}
    labels = {name: label for name, label in labels.items() if name in there}
    figure.set_size_inches(4.6 * len(panels) + 2.4, 5)
    styles = list(itertools.product(("-", "--"), range(10)))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for at, (title, lines) in zip(axes, panels.items(), strict=True):
        for number, (candidate, label) in enumerate(labels.items()):
            first = [x for x in lines if (x["candidate"], x["seed"]) == (candidate, 0)]
            runs = sorted(first, key=lambda line: float(line["lr"]))
            dashes, color = styles[number % len(styles)]
            at.plot(
                [line["lr"] for line in runs],
                [loss_of(line) for line in runs],
                dashes,
                label=label,
                marker=MARKERS[number % len(MARKERS)],
                color=colormaps["tab10"](color),
                markersize=4,
            )
        losses = list(map(loss_of, lines))
        before = [line["before"] for line in lines if "before" in line]
        least, most = min(losses), max(before or filter(math.isfinite, losses))
        at.set(xscale="log", xlabel="peak learning rate", ylabel="held-out loss", title=title)
        at.set_ylim(least - 0.02 * (most - least), least + 0.4 * (most - least))
    handles, names = axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=7)
