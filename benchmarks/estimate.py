"""Compares learning rates that Prodigy estimates with tabled ones, on the runs of ``quality``.

The estimate needs no change of ds_ext: hooks read each gradient before the optimizer does. The rate
of a step depends only on earlier steps, because optimizers step inside backward.
"""

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import quality, report
from benchmarks.matrix import summary, texts, training
from benchmarks.matrix.candidates import CANDIDATES, Candidate, Stepper
from benchmarks.matrix.lines import Lines, Point, loss_of, point_of
from ds_ext.rates import RATES

FOLDER = report.RESULTS / "estimate"
BETA3 = math.sqrt(0.999)  # decay of both sums, as prodigyopt's default
EVERY = 11  # the sums contain every 11th element: prodigyopt's slice_p
RULES = ("adamw", "adalomo", "lomo")
TITLE = "Learning rates that Prodigy estimates"
TEXT = """
Prodigy's estimate d (arXiv 2306.06101) is the learning rate of ds_ext's AdamW, AdaLomo and LOMO in
the fine-tunes of `python -m benchmarks quality`, with the same batches and schedule. Each step
uses the estimate of the steps before it. The sums contain every 11th element. With coefficient 1,
the sums and d are those of prodigyopt with `slice_p=11`. A run "gives up" the share (loss - best) /
(loss before - best) of the gain, in percent, where best is the lowest loss of all fixed rates with
the same seed. With seeds other than 0 only one or two fixed rates were run. "Tabled" is a fixed
rate, the one to start at. "Rates" are the first and last ones; LOMO's first step is not counted.

Each run has only {steps} steps, and the estimate needs some of them to rise from d0. Longer runs
may lose less by this; none was made.
"""


class Estimated:
    """A stepper whose learning rate is d, Prodigy's estimate (arXiv 2306.06101, algorithm 3).

    With weights w = d² · schedule, both sums start at 0:

        r ← beta3 · r + w · <g, x0 - x>,  s ← beta3 · s + w · g,  d ← max(d, coefficient · r / ‖s‖)

    The norm of s is dual to the norm in which a step has length d: the sum of absolute values for
    AdamW, this sum multiplied by the RMS of x0 for AdaLomo, the Euclidean norm for LOMO. LOMO's
    rate is d divided by the norm of the first gradient. Its first step only measures this norm.
    """

    def __init__(self, inner: Stepper, rule: str, d0: float, coefficient: float) -> None:
        self.inner, self.rule, self.model = inner, rule, inner.model
        self.coefficient, self.d0, self.d = coefficient, d0, d0
        self.r, self.factor, self.grad_norm = 0.0, 1.0, 0.0
        self.rates: list[float] = []  # before the schedule
        self.found: list[float] = []  # coefficient · r / ‖s‖
        self.sums: list[tuple[float, float, float]] = []  # per parameter: <g, x0 - x>, ‖s‖, ‖g‖²
        for p in inner.model.parameters():
            p.register_hook(self._hook(p))

    def _hook(self, p: nn.Parameter) -> Callable[[Tensor], None]:
        x0 = _sliced(p)
        s = torch.zeros_like(x0)
        scale = max(float(p.detach().float().square().mean().sqrt()), 1e-3)

        def add(gradient: Tensor) -> None:
            g = _sliced(gradient)
            w = (self.d / self.d0) ** 2 * self.factor
            s.mul_(BETA3).add_(g, alpha=w)
            length = float(s @ s if self.rule == "lomo" else s.abs().sum())
            length *= scale if self.rule == "adalomo" else 1.0
            self.sums.append((w * float(g @ (x0 - _sliced(p))), length, float(g @ g)))

        return add

    def rate(self, factor: float) -> None:
        self.factor = factor

    def step(self, batch: texts.Batch) -> Tensor:
        """Steps with the estimate of the steps before, then renews the estimate."""
        rate = self.d if self.rule != "lomo" else self.d / (self.grad_norm or math.inf)
        self.rates.append(rate)
        self.inner.rate(rate * self.factor)
        loss = self.inner.step(batch)
        inner, length, square = map(math.fsum, zip(*self.sums, strict=True))
        self.sums.clear()
        self.grad_norm = self.grad_norm or math.sqrt(square * EVERY)
        self.r = BETA3 * self.r + inner
        length = math.sqrt(length / EVERY) if self.rule == "lomo" else length
        self.found.append(self.coefficient * self.r / length)
        self.d = max(self.d, self.found[-1])
        return loss

    def close(self) -> None:
        self.inner.close()


def _sliced(x: Tensor) -> Tensor:
    """Every ``EVERY``-th element, copied as fp32."""
    return x.detach().flatten()[::EVERY].float().clone()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset", nargs="+", choices=texts.DATA, default=list(texts.DATA))
    add("--optimizer", nargs="+", choices=RULES, default=list(RULES))
    add("--d0", nargs="+", type=float, default=[1e-6], help="first estimates (default: 1e-6)")
    add("--coefficient", nargs="+", type=float, default=[1.0], help="Prodigy's d_coef (default: 1)")
    add("--seeds", nargs="+", type=int, choices=range(3), default=[0, 1, 2], help="default: all")
    add("--model", type=Path, default=quality.MODEL, help="folder")
    add("--lines", type=Path, default=FOLDER, help="folder of the stored runs and the report")
    add("--report", action="store_true", help="only write the report of the stored runs")


def main(args: argparse.Namespace) -> None:
    """Makes the missing runs, and writes the report."""
    setup = {k: quality.FULL[k] for k in quality.SHAPE if k in quality.FULL}
    setup |= {"dtype": "bf16", "model": args.model.name}
    lines = Lines(args.lines, setup)
    if not args.report:
        make(args, lines)
    write(lines, Lines(quality.FOLDER, setup))


def make(args: argparse.Namespace, lines: Lines) -> None:
    """Makes the missing runs, those of the first seed first."""
    tokenizer, model = quality.load(args.model, quality.DTYPES["bf16"])
    setup = argparse.Namespace(**lines.setup)
    grid = (args.seeds, args.optimizer, args.coefficient, args.d0, args.dataset)
    for seed, rule, coefficient, d0, data in itertools.product(*grid):
        point = Point(data, f"{rule}, coefficient {coefficient:g}", d0, seed)
        if point in map(point_of, lines.all):
            continue
        made: list[Estimated] = []
        how = functools.partial(_start, made, rule, coefficient)
        batches = quality.batches_of(setup, data, seed, tokenizer)
        rows = texts.rows(data, "test", tokenizer, setup.tokens)[: setup.held_out]
        candidate, tests = Candidate(point.candidate, d0, how), texts.held_out(rows)
        began = time.thread_time()
        line = point._asdict() | training.run(model, candidate, d0, seed, batches, tests)
        line |= {"rates": _short(made[0].rates), "estimates": _short(made[0].found)}
        lines.add(line | {"machine": report.machine()})
        print(point, line["loss"], line["rates"], line["estimates"], file=sys.stderr)
        print(f"{time.thread_time() - began:.0f} s", file=sys.stderr, flush=True)


def _start(
    made: list[Estimated], rule: str, coefficient: float, model: nn.Module, d0: float, seed: int
) -> Estimated:
    """The stepper of a run, which is also added to ``made``."""
    made.append(Estimated(CANDIDATES[rule].make(model, 1.0, seed), rule, d0, coefficient))
    return made[-1]


def _short(values: list[float]) -> list[float]:
    return [float(f"{x:.3g}") for x in values]


def write(lines: Lines, tabled: Lines) -> None:
    """Writes the report: losses and shares of the gain that fixed and estimated rates give up."""
    tables = {}
    for rule in RULES:
        start = RATES[rule].start
        fixed = [line for line in tabled.all if (line["candidate"], line["lr"]) == (rule, start)]
        own = [line for line in lines.all if line["candidate"].startswith(f"{rule},")]
        names = {point_of(line)[1:3] for line in own}
        groups = {f"tabled, {start:g}": fixed} | {
            f"{name.partition(', ')[2]}, d0 {d0:g}": [
                line for line in own if point_of(line)[1:3] == (name, d0)
            ]
            for name, d0 in sorted(names)
        }
        if own and fixed:
            tables[CANDIDATES[rule].label] = [_row(k, g, rule, tabled) for k, g in groups.items()]
    if not tables:
        print("no runs yet, or no runs of `quality` to compare with")
        return
    made = "; ".join(summary.machines(lines.all))
    made += ".\nMade by `python -m benchmarks estimate`, page by `--report`."
    report.write("estimate", TITLE, TEXT.format(**lines.setup), tables, None, made, lines.folder)


def _row(name: str, group: list[dict[str, Any]], rule: str, tabled: Lines) -> dict[str, object]:
    """A row: the runs of each data set, by seed."""
    row: dict[str, object] = {"rate": name}
    worst = []
    for data in texts.DATA:
        cells = []
        for line in sorted((x for x in group if x["data"] == data), key=lambda x: x["seed"]):
            of = tabled.of(data, rule, line["seed"])
            best, before = min(map(loss_of, of)), of[0]["before"]
            worst.append((loss_of(line) - best) / (before - best))
            used = [rate for rate in line.get("rates", ()) if rate]  # LOMO's first rate is 0
            ends = f", rates {used[0]:.1e} to {used[-1]:.1e}" if used else ""
            cells.append(f"{line['loss']:.3f} ({worst[-1]:.0%}{ends})")
        row[data] = "; ".join(cells) or "not run"
    missing = " or more" * ("not run" in row.values())
    return row | {"gives up at most": f"{max(worst):.0%}{missing}"}
