"""Writes the report of a matrix of fine-tuning runs, from the stored runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.matrix import costs, forgetting, summary
from benchmarks.matrix.candidates import CANDIDATES
from benchmarks.matrix.lines import Lines

UNIT = "deepspeed-adamw"
TITLE = "Which optimizer fine-tunes best, and at which learning rate"
TEXT = """
{model} is fine-tuned, all its weights (with LoRA: adapters), for {steps} steps of {rows} rows, of
{tokens} tokens at most, in one process on one CPU thread, forward and backward in {dtype}; the
same rows in the same order for all that are compared. The rate warms up over a tenth of the steps
and falls as a cosine to a tenth; nothing is clipped, and no weight decays. ds_ext's optimizers
write bf16 weights with stochastic rounding and have no masters; AdamW is torch's under DeepSpeed's
ZeRO-1, with fp32 masters; LoRA is PEFT's on all linear layers, scaled by 2, with that AdamW; the
published packages step bf16 weights as they do, without masters and rounded to nearest. Muon has
`"adjust_lr_fn": "match_rms_adamw"`, all others the defaults. Adafactor with
`"relative_step": false` takes AdaLomo's steps, bit by bit, and is not run beside it.

Loss is in nats per token of the answers, on {held_out} rows that are held out; "answers wholly
right" are the rows whose whole answer greedy decoding gives. ± is the standard deviation over n
seeds, of the rows' order and of rounding; where n = 1 nothing tells how much of a difference is
chance. Rates are 1 and 3 times powers of ten, and half and twice of the best of these, with one
seed; the best has further seeds, and so has the second best where its loss is less than the best's
mean over seeds. Of these two the one with the lower mean is shown.
"""
DATA = {
    "sounds": "Pronunciations of English words: the CMU dictionary",
    "devil": "Definitions: The Devil's Dictionary (no answer can be right: read the loss)",
    "films": "Sentences of film reviews: positive or negative",
}
FORGETTING = """
Forgetting is the increase of the loss, in nats per token, of text that the model wrote before
fine-tuning: 64 rows of 64 tokens, sampled at temperature 1. It estimates the Kullback-Leibler
divergence of the fine-tuned model from the model before. The runs are those at the best rates.
"""
COSTS = """
Time of a step is the process's own, which other programs' turns on the core do not count in but
their use of its caches does: medians of 5 steps that are taken in turns with a forward and backward
pass alone of the same batch. Bytes are those of live tensors, counted from when they are made until
they are freed: between steps weights, state and what else is kept, at the most also gradients and
activations.
"""


def write(lines: Lines, data: Sequence[str], names: Sequence[str], folder: Path) -> None:
    """Writes the report into ``folder``; does nothing without runs.

    Args:
        lines: the stored runs.
        data: data sets, in order.
        names: candidates, in order.
        folder: the folder of the report and of the stored runs.
    """
    if not lines.all:
        print(f"{folder}: no lines yet")
        return
    labels = {name: CANDIDATES[name].label for name in names}
    there = [name for name in data if any(line["data"] == name for line in lines.all)]
    tables = {"Best of each": summary.overall(lines, there, labels)}
    tables |= {
        f"{DATA[name]} (`{name}`)": summary.of_data(lines, name, labels, UNIT)
        for name in there
        if any(summary.best_of(lines, name, c) for c in labels)
    }
    tables |= _in_other_dtypes(lines, there, labels)
    again = Lines(folder / forgetting.FOLDER, lines.setup)
    if again.all:
        tables[forgetting.TITLE] = forgetting.table(again, there, labels)
    measured = costs.read(folder, lines.setup["dtype"])
    shown = {name: line for name, line in measured.items() if "error" not in line}
    if shown:
        tables["Cost of a step"] = [
            {"optimizer": CANDIDATES[name].label} | costs.shown(line)
            for name, line in shown.items()
        ]
    notes = summary.failed(lines, labels)
    text = TEXT.format(**lines.setup) + (COSTS if shown else "")
    text += FORGETTING if again.all else ""
    if notes:
        text += "\n"
        text += "\n".join(f"- {note}" for note in notes)
    loads = [line["load"] for line in lines.all if "load" in line]
    made = (
        f"{'; '.join(summary.machines(lines.all))}.\nMade by `python -m benchmarks quality` "
        f"(load of the machine {min(loads, default=0):.0f} to {max(loads, default=0):.0f} "
        "meanwhile, on which losses do not depend), page by `--report`, costs by `--costs`."
    )
    report.write("quality", TITLE, text, {k: v for k, v in tables.items() if v}, made, folder)


def _in_other_dtypes(
    lines: Lines, data: Sequence[str], labels: Mapping[str, str]
) -> dict[str, list[dict[str, object]]]:
    """Tables of the runs that differ only in the dtype."""
    tables = {}
    for dtype in {"fp32", "bf16"} - {lines.setup["dtype"]}:
        others = Lines(lines.folder, lines.setup | {"dtype": dtype})
        tables[f"The same in {dtype} (`--dtype {dtype}`)"] = summary.overall(others, data, labels)
    return tables
