"""The tables of docs/choosing.md: where to begin, and what each optimizer gave and cost.

They are made of ``ds_ext.rates`` and of the lines in benchmarks/results alone.
"""

import math

from benchmarks import quality, report, scratch
from benchmarks.matrix import costs, summary
from benchmarks.matrix.candidates import CANDIDATES
from benchmarks.matrix.lines import Lines
from ds_ext.rates import RATES, Rate, shown
from ds_ext.rules import REGISTRY

SETUP = {k: quality.FULL[k] for k in ("steps", "rows", "tokens", "held_out")} | {
    "dtype": "bf16",
    "model": quality.MODEL.name,
}
DATA = list(quality.FULL["dataset"])
UNIT = "deepspeed-adamw"
OTHERS = (UNIT, "lora")  # in the table beside this package's
FROM_SCRATCH = {
    "best rate": "best learning rate",
    "held-out loss": "held-out loss",
    "less AdamW's": f"loss less that of {CANDIDATES[UNIT].label}",
}
SAME = {"adafactor": "adalomo"}  # which take the same steps, with a learning rate that is given


def lines() -> Lines:
    """The runs that are committed."""
    return Lines(quality.FOLDER, SETUP)


def table() -> str:
    """Rows by what is held between steps, then by name."""
    runs, spent = lines(), costs.read(quality.FOLDER, SETUP["dtype"])
    there = [name for name in DATA if summary.best_of(runs, name, UNIT)]
    head = ["optimizer", "start at", "gives up", "then try", "bytes a parameter", "time"]
    head += [f"`{name}`" for name in there]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    names = sorted((*OTHERS, *RATES), key=lambda n: spent.get(n, {}).get("held", math.inf))
    for name in names:
        if name in SAME:
            continue
        same = [REGISTRY[other].spelling for other, of in SAME.items() if of == name]
        label = ", ".join([CANDIDATES[name].label, *same])
        cells = [label, *_rates(runs, name), *_costs(spent.get(name, {}))]
        cells += [_less(runs, data, name) for data in there]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def from_scratch() -> str:
    """What was trained from scratch, models of several sizes side by side; best of the first."""
    labels = {name: CANDIDATES[name].label for name in scratch.STARTS}
    setup = scratch.DEFAULTS | {"data": scratch.DATA}
    rows: dict[str, dict[str, object]] = {}
    for size in scratch.SIZES:
        runs = scratch.lines_of(scratch.FOLDER, setup, size)
        for row in summary.of_data(runs, scratch.DATA, labels, UNIT, with_answers=False):
            own = rows.setdefault(str(row["optimizer"]), {"optimizer": row["optimizer"]})
            own |= {f"{what}, {size}": row[key] for what, key in FROM_SCRATCH.items()}
    keys = dict.fromkeys(key for row in rows.values() for key in row)
    return report.table([{key: row.get(key) for key in keys} for row in rows.values()])


def _rates(runs: Lines, name: str) -> tuple[str, str, str]:
    """Where to begin, what that gives up, and what to try next."""
    shares = summary.given_up(runs, DATA, name)
    start = min(shares, key=shares.__getitem__) if name in OTHERS else RATES[name].start
    return shown(start), f"{100 * shares[start]:.0f} %", _others(start)


def _others(start: float) -> str:
    return ", ".join(map(shown, Rate(start).others))


def _costs(line: dict) -> tuple[str, str]:
    """Bytes a parameter between steps, and time by that of forward and backward."""
    if "held" not in line:
        return "", ""
    return f"{line['held'] / line['parameters']:.2f}", f"{line['ratio']:.2f}"


def _less(runs: Lines, data: str, name: str) -> str:
    """How far the loss is from AdamW's, each at its best rate; AdamW's row has its own loss."""
    own, unit = (summary.best_of(runs, data, n) for n in (name, UNIT))
    if own is None or unit is None:
        return ""
    if name == UNIT:
        return summary.spread(own.losses)
    return summary.less(own, unit) + (" at the edge of rates" if own.is_at_edge else "")
