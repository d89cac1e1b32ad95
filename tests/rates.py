"""The table of docs/choosing.md: where to begin, and what each optimizer gave and cost.

It is made of ``ds_ext.rates`` and of the lines in benchmarks/results/quality alone.
"""

import math

from benchmarks import quality
from benchmarks.matrix import costs, summary
from benchmarks.matrix.candidates import CANDIDATES
from benchmarks.matrix.lines import Lines
from ds_ext.rates import RATES, shown
from ds_ext.rules import REGISTRY

SETUP = {k: quality.FULL[k] for k in ("steps", "rows", "tokens", "held_out")} | {
    "dtype": "bf16",
    "model": quality.MODEL.name,
}
DATA = list(quality.FULL["dataset"])
UNIT = "deepspeed-adamw"
OTHERS = (UNIT, "lora")  # in the table beside this package's
SAME = {"adafactor": "adalomo"}  # which take the same steps, with a learning rate that is given


def lines() -> Lines:
    """The runs that are committed."""
    return Lines(quality.FOLDER, SETUP)


def table() -> str:
    """Rows by what is held between steps, then by name."""
    runs, spent = lines(), costs.read(quality.FOLDER, SETUP["dtype"])
    there = [name for name in DATA if summary.best_of(runs, name, UNIT)]
    head = ["optimizer", "start at", "then try", "bytes a parameter", "time"]
    head += [f"`{name}`" for name in there]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    names = sorted((*OTHERS, *RATES), key=lambda n: spent.get(n, {}).get("held", math.inf))
    for name in names:
        if name in SAME:
            continue
        same = [REGISTRY[other].spelling for other, of in SAME.items() if of == name]
        label = ", ".join([CANDIDATES[name].label, *same])
        cells = [label, *_rates(name), *_costs(spent.get(name, {}))]
        cells += [_less(runs, data, name) for data in there]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _rates(name: str) -> tuple[str, str]:
    """Where to begin, and what to try next."""
    if name in OTHERS:
        best = [summary.best_of(lines(), data, name) for data in DATA]
        return ", ".join(dict.fromkeys(shown(b.lr) for b in best if b)) + " was best", ""
    low, high = map(shown, RATES[name].others)
    start = shown(RATES[name].start) + ("" if RATES[name].is_measured else " (not measured)")
    return start, f"{low}, {high}"


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
