"""Loss against learning rate: a panel for each data set, a line for each candidate."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.matrix.lines import Lines, loss_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osv^D<>pP*Xhd"


def sensitivity(
    figure: "Figure", lines: Lines, data: Sequence[str], labels: Mapping[str, str]
) -> None:
    """Draws runs of the first seed.

    Args:
        figure: is drawn into.
        lines: of all runs.
        data: data sets.
        labels: candidate -> what it is called.
    """
    from matplotlib import colormaps

    shown = [name for name in data if any(line["data"] == name for line in lines.all)]
    there = {line["candidate"] for line in lines.all}
    labels = {name: label for name, label in labels.items() if name in there}
    figure.set_size_inches(4.6 * len(shown) + 2.4, 5)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    styles = list(itertools.product(("-", "--"), range(10)))
    for number, (candidate, label) in enumerate(labels.items()):
        dashes, color = styles[number % len(styles)]
        look = {"color": colormaps["tab10"](color), "linestyle": dashes, "markersize": 4}
        for axes, name in zip(panels, shown, strict=True):
            runs = sorted(lines.of(name, candidate, 0), key=lambda line: float(line["lr"]))
            axes.plot(
                [line["lr"] for line in runs],
                [loss_of(line) for line in runs],
                label=label,
                marker=MARKERS[number % len(MARKERS)],
                **look,
            )
    for axes, name in zip(panels, shown, strict=True):
        before = [x["before"] for x in lines.all if x["data"] == name and "before" in x]
        losses = [loss_of(line) for line in lines.all if line["data"] == name]
        least, most = min(losses), max(before, default=max(losses))
        axes.set(xscale="log", xlabel="peak learning rate", ylabel="held-out loss", title=name)
        axes.set_ylim(least - 0.02 * (most - least), least + 0.4 * (most - least))
    handles, names = panels[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=7)
