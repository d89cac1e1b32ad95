"""Compares optimizers and learning rates for fine-tuning SmolLM2-135M on three tasks.

Each run is stored as a line of JSON. The command skips stored runs, so it can be interrupted and
restarted. ``--report`` only writes the tables and plots of the stored runs.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import report
from benchmarks.matrix import costs, forgetting, page, search, texts, training
from benchmarks.matrix.candidates import CANDIDATES
from benchmarks.matrix.lines import Lines, Point

FOLDER = report.RESULTS / "quality"
MODEL = Path("runs/cache/SmolLM2-135M-Instruct")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPE = ("dtype", "steps", "rows", "tokens", "held_out")  # equal in all compared runs
# Default options, without and with --quick.
FULL: dict[str, Any] = {
    "dataset": list(texts.DATA),
    "optimizer": list(CANDIDATES),
    "steps": 32,
    "rows": 4,
    "tokens": 48,
    "held_out": 64,
    "seeds": 3,
    "lines": FOLDER,
}
QUICK: dict[str, Any] = {
    "dataset": ["sounds"],
    "optimizer": ["deepspeed-adamw", "adalomo", "lora"],
    "steps": 6,
    "rows": 2,
    "tokens": 96,
    "held_out": 16,
    "seeds": 1,
    "lines": Path("runs/quality_quick"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset", nargs="+", choices=texts.DATA, help="default: all")
    add("--optimizer", nargs="+", choices=CANDIDATES, help="default: all")
    add("--model", type=Path, default=MODEL, help="folder (default: what `make demo` unpacks)")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--steps", type=int, help=f"default: {FULL['steps']}")
    add("--rows", type=int, help=f"rows per batch (default: {FULL['rows']})")
    add("--tokens", type=int, help=f"the longest row (default: {FULL['tokens']})")
    add("--held-out", type=int, help=f"held-out rows (default: {FULL['held_out']})")
    add("--seeds", type=int, help=f"at the best learning rate (default: {FULL['seeds']})")
    add("--minutes", type=float, default=1e9, help="start no run after them (default: no limit)")
    add("--lines", type=Path, help="folder of the stored runs and the report")
    add("--quick", action="store_true", help="a small matrix, to test the command")
    add("--costs", action="store_true", help="measure time and memory of a step instead")
    add("--forgetting", action="store_true", help="measure what the best runs forget instead")
    add("--report", action="store_true", help="only write the report of the stored runs")


def main(args: argparse.Namespace) -> None:
    """Makes the missing runs, and writes the report."""
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    began = time.monotonic()
    lines = lines_of(args)
    is_matrix = not (args.report or args.costs or args.forgetting)
    left = Matrix(args, lines) if is_matrix else None
    while left is not None and time.monotonic() - began < args.minutes * 60:
        if (point := left.next()) is None:
            break
        left.run(point)
    if args.forgetting:
        measure_forgetting(args, lines, began + args.minutes * 60)
    if args.costs:
        measure_costs(args)
    data = shown(args.dataset, "data", texts.DATA, lines)
    names = shown(args.optimizer, "candidate", CANDIDATES, lines)
    page.write(lines, data, names, args.lines)


def shown(asked: list[str], key: str, known: Iterable[str], lines: Lines) -> list[str]:
    """Returns what the report shows: what is asked for, and what has stored runs."""
    stored = {line[key] for line in lines.all}
    return [name for name in known if name in asked or name in stored]


def lines_of(args: argparse.Namespace) -> Lines:
    """Returns the stored runs with this model and these batches."""
    setup = {k: getattr(args, k) for k in SHAPE}
    return Lines(args.lines, setup | {"model": args.model.name})


class Matrix:
    """The runs of a model, which is loaded once."""

    def __init__(self, args: argparse.Namespace, lines: Lines) -> None:
        self.args, self.lines = args, lines
        asked = {name: CANDIDATES[name] for name in args.optimizer}
        tiers = [
            {name: c.start for name, c in asked.items() if c.tier == tier} for tier in range(3)
        ]
        self.starts = [[tier] for tier in tiers]  # one tier after another
        self.tokenizer, self.model = load(args.model, DTYPES[args.dtype])
        self.before: dict[str, training.Measured] = {}

    def next(self) -> Point | None:
        """Returns the next missing run."""
        args = self.args
        found = (
            search.next_run(self.lines, starts, args.dataset, args.seeds) for starts in self.starts
        )
        return next(filter(None, found), None)

    def run(self, point: Point) -> None:
        """Makes a run and stores its result, or its error if it fails."""
        batches = batches_of(self.args, point.data, point.seed, self.tokenizer)
        rows = texts.rows(point.data, "test", self.tokenizer, self.args.tokens)
        tests = texts.held_out(rows[: self.args.held_out])
        if point.data not in self.before:
            self.before[point.data] = training.measure(self.model, tests)
        was = self.before[point.data]
        line: dict[str, Any] = dict(point._asdict())
        candidate = CANDIDATES[point.candidate]
        began = time.monotonic()
        try:
            line |= training.run(self.model, candidate, point.lr, point.seed, batches, tests)
        except Exception as error:  # from any package: continue, and report it
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        line |= {"before": round(was.loss, 5), "accuracy_before": round(was.accuracy, 5)}
        line["machine"] = report.machine()
        self.lines.add(line)
        told = line.get("error") or f"loss {line['loss']}, accuracy {line['accuracy']}"
        print(f"{point}: {told}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def batches_of(args: argparse.Namespace, data: str, seed: int, tokenizer: Any) -> list[texts.Batch]:
    """Returns the batches of a run."""
    rows = texts.rows(data, "train", tokenizer, args.tokens)
    return texts.batches(rows, args.rows, args.steps, seed)


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """Returns the tokenizer and the model, and initializes DeepSpeed with one rank."""
    import deepspeed

    from benchmarks.train import join_world_of_one

    if not folder.exists():
        raise SystemExit(f"{folder}: missing; `make demo` unpacks it, or give --model another.")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
    join_world_of_one()
    deepspeed.init_distributed("gloo", verbose=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return transformers.AutoTokenizer.from_pretrained(folder), model


def measure_forgetting(args: argparse.Namespace, lines: Lines, until: float) -> None:
    """Repeats the runs at the best rates, and measures them on text that the model wrote before."""
    tokenizer, model = load(args.model, DTYPES[args.dtype])
    done = Lines(args.lines / forgetting.FOLDER, lines.setup)
    own = forgetting.written(model, tokenizer.bos_token_id)
    before = training.measure(model, own).loss
    while time.monotonic() < until:
        found = forgetting.missing(lines, done, args.dataset, args.optimizer, args.seeds)
        if (point := next(found, None)) is None:
            break
        batches = batches_of(args, point.data, point.seed, tokenizer)
        candidate = CANDIDATES[point.candidate]
        line = point._asdict()
        line |= training.run(model, candidate, point.lr, point.seed, batches, own)
        done.add(line | {"before": round(before, 5), "machine": report.machine()})
        print(f"{point}: {before:.4f} to {line['loss']}", file=sys.stderr, flush=True)


def measure_costs(args: argparse.Namespace) -> None:
    """Measures missing costs of a step, with a new process for each candidate."""
    done = costs.read(args.lines, args.dtype)
    for name in args.optimizer:
        if name in done:
            continue
        try:
            line = costs.isolated(cost, args, name)
        except Exception as error:  # as above
            line = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        costs.add(args.lines, {"candidate": name, "dtype": args.dtype} | line)
        print(name, line, file=sys.stderr, flush=True)


def cost(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns the cost of a candidate's step, measured in this process."""
    tokenizer, model = load(args.model, DTYPES[args.dtype])
    batches = batches_of(args, args.dataset[0], 0, tokenizer)
    found = costs.measure(model, CANDIDATES[name], batches, rounds=5)
    return found | {"model": args.model.name, "machine": report.machine()}
