"""Learning rates in documents: the tables of docs/choosing.md, and the rates that pages quote.

Both are made of ``ds_ext.rates`` and of the lines in benchmarks/results alone.
"""

import math
import re

from benchmarks import quality, report, scratch
from benchmarks.matrix import costs, summary
from benchmarks.matrix.candidates import CANDIDATES
from benchmarks.matrix.lines import Lines
from ds_ext.rates import LORA, RATES, shown, span
from ds_ext.rules import REGISTRY

SETUP = {k: quality.FULL[k] for k in ("steps", "rows", "tokens", "held_out")} | {
    "dtype": "bf16",
    "model": quality.MODEL.name,
}
DATA = list(quality.FULL["dataset"])
UNIT = "deepspeed-adamw"
STARTS = {UNIT: "adamw", "came-8bit": "came"}  # candidates with the rate of a rule
OTHERS = (*STARTS, LORA)  # in the table beside this package's
LORA_LABEL = "LoRA's adapters, AdamW"
FROM_SCRATCH = {"best rate": "best learning rate", "held-out loss": "held-out loss"}
FROM_SCRATCH |= {"less AdamW's": f"loss less that of {CANDIDATES[UNIT].label}"}
SEEDS = quality.FULL["seeds"]  # of the benchmark from scratch too; only other numbers are shown
SAME = {"adafactor": "adalomo"}  # which take the same steps, with a learning rate that is given


def lines() -> Lines:
    return Lines(quality.FOLDER, SETUP)


def table() -> str:
    """Learning rates: where to begin, and what is published."""
    rows = ["| optimizer | start at | published | for | with |", "|" + "---|" * 5]
    for name, rate in RATES.items():
        label = REGISTRY[name].spelling if name in REGISTRY else LORA_LABEL
        cells = ["", "", ""]
        if rate.published is not None:
            run = rate.published.run.replace("|", "\\|")
            decay = rate.published.weight_decay
            cells = [span(rate.published), f"[{run}]({rate.published.source})"]
            cells.append(rate.published.schedule + f"; weight decay {decay}" * (decay != "0"))
        rows.append(f"| {' | '.join([label, shown(rate.start), *cells])} |")
    return "\n".join(rows)


def results() -> str:
    """What each optimizer gave and cost; rows by what is held between steps, then by name."""
    runs, spent = lines(), costs.read(quality.FOLDER, SETUP["dtype"])
    there = [name for name in DATA if summary.best_of(runs, name, UNIT)]
    head = ["optimizer", "gives up", "bytes a parameter", "time"]
    head += [f"`{name}`" for name in there]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    names = dict.fromkeys([*OTHERS, *RATES])
    for name in sorted(names, key=lambda n: spent.get(n, {}).get("held", math.inf)):
        if name in SAME:
            continue
        same = [REGISTRY[other].spelling for other, of in SAME.items() if of == name]
        label = ", ".join([CANDIDATES[name].label, *same])
        cells = [label, given_up(runs, name), *_costs(spent.get(name, {}))]
        cells += [_less(runs, data, name) for data in there]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def given_up(runs: Lines, name: str) -> str:
    """What the rate to start at gives up of the gain, at worst over the data sets."""
    return f"{100 * summary.given_up(runs, DATA, name)[start_of(name)]:.0f} %"


def start_of(candidate: str) -> float:
    """The rate to start a candidate of the benchmark at: AdamW has one, whoever makes its steps."""
    return RATES[STARTS.get(candidate, candidate)].start


def from_scratch() -> str:
    """What was trained from scratch, models of several sizes side by side; best of the first."""
    known = scratch.candidates(scratch.DEFAULTS["size"])
    labels = {name: known[name].label for name in scratch.STARTS}
    setup = scratch.DEFAULTS | {"data": scratch.DATA}
    rows: dict[str, dict[str, object]] = {}
    for size in scratch.SIZES:
        runs = scratch.lines_of(scratch.FOLDER, setup, size)
        for row in summary.of_data(runs, scratch.DATA, labels, UNIT, with_answers=False):
            own = rows.setdefault(str(row["optimizer"]), {"optimizer": row["optimizer"]})
            own |= {f"{what}, {size}": row[key] for what, key in FROM_SCRATCH.items()}
    keys = dict.fromkeys(key for row in rows.values() for key in row)
    made = report.table([{key: row.get(key) for key in keys} for row in rows.values()])
    return made.replace(f" (n = {SEEDS})", "")


def renewed(text: str) -> str:
    """A document whose examples set the rates to start at.

    An example's optimizer is the last one that its block or line names before the rate, or else
    AdaLomo, the documents' usual one. An object for ``lora_`` has LoRA's rate. A page that records
    a run names its rates in words, not as the run's options.
    """

    def block(found: re.Match[str]) -> str:
        return _SET.sub(lambda rate: _started(found[0], rate), found[0])

    return _BLOCK.sub(block, text)


def _started(text: str, found: re.Match[str]) -> str:
    """What sets a rate in a block, with the rate to start at."""
    before = text[: found.start()]
    own = before[before.rfind("{") + 1 :]  # of the JSON object, if it is one
    names = _NAME.findall(before)
    name = LORA if "lora_" in own else names[-1].lower() if names else "adalomo"
    if name not in RATES:  # of an optimizer that the document makes up
        return found[0]
    digits, rate = found["rate"], RATES[name].start
    if float(digits) == rate:
        return found[0]
    is_yaml = ".0e" in digits  # to which 1e-3 is a word
    return found["set"] + (f"{rate:.1e}".replace("e-0", "e-") if is_yaml else shown(rate))


_BLOCK = re.compile(r"(?ms)^```.*?^```$|^[^\n]+$")
_SET = re.compile(
    r"""(?P<set>--(?:lr|learning_rate)[ =]|(?:\blr|\blearning_rate)"?\s*[=:]\s*)"""
    r"(?P<rate>\d[\d.]*(?:e-\d+)?)"
)
_NAME = re.compile(rf"\b(?:{'|'.join((*REGISTRY, 'signsgd'))})(?![a-z])", re.I)


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
    told = summary.spread(own.losses) if name == UNIT else summary.less(own, unit)
    edge = ", edge" if own.is_at_edge and name != UNIT else ""
    return told.removesuffix(f" (n = {SEEDS})").replace(" ± ", "±") + edge
