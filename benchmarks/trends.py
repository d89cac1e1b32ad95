"""Growth of a step's cost with the number of parameters, the number of ranks and the bucket size.

Times are ratios between runs that are timed in turns: medians over rounds, with the minimum and
maximum in brackets. Each trend has its own page and plot.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import growth, links, memory, report
from benchmarks.growth import FULL, KEPT, PAIRS, QUICK, SHARES, Engine, Extent
from benchmarks.memory import DTYPES, shapes_of
from benchmarks.ranks import apart, on_ranks
from benchmarks.train import ADAMW, BARE, OURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGE = 2e8  # larger models are timed in fewer rounds; twice as large ones without AdamW
AMONG = 64  # simulated ranks for the trend of buckets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bf16 = torch.cpu._is_avx512_bf16_supported()
    parser.add_argument("--of", nargs="+", choices=TRENDS, default=list(TRENDS))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if bf16 else "fp32")
    parser.add_argument("--length", type=int, default=128, help="tokens per rank")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few ranks and rounds")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")


def main(args: argparse.Namespace) -> None:
    """Measures the trends, and writes a page and a plot of each."""
    torch.set_num_threads(1)  # as in all timed processes
    for name in args.of:
        TRENDS[name](args, QUICK if args.quick else FULL)


Line = tuple[Sequence[float], Sequence[Any], str, str, str]  # (x, y, style, color, label)
BLUE, ORANGE, GREEN, GRAY = "tab:blue", "tab:orange", "tab:green", "tab:gray"


def panel(axes: Any, title: str, along: str, lines: Sequence[Line], log: bool = False) -> None:
    """Draws lines on axes with a logarithmic scale."""
    for at, values, style, color, label in lines:
        axes.plot(at, values, style, color=color, label=label)
    axes.set_xscale("log", base=10 if along == "parameters" else 2)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(along)
    axes.set(yscale="log") if log else axes.set_ylim(0)
    axes.legend(fontsize=6.5)


def three(figure: "Figure") -> Any:
    """Returns three panels side by side."""
    figure.set_size_inches(12, 4)
    return figure.subplots(1, 3)


def ratio(times: Mapping[str, list[float]], run: str, unit: str) -> str:
    """Returns median, minimum and maximum over rounds; empty if a run was not timed."""
    if not {run, unit} <= times.keys():
        return ""
    apart = sorted(a / b for a, b in zip(times[run], times[unit], strict=True))
    return f"{middle(times, run, unit):.3g} ({apart[0]:.2g}–{apart[-1]:.2g})"


def middle(times: Mapping[str, list[float]], run: str, unit: str) -> float:
    """Returns the median over rounds."""
    return report.ratios(times, unit)[run][0]


# Parameters.

COLORS = (BLUE, ORANGE, GRAY, GREEN)  # colors of SHARES


def of_parameters(args: argparse.Namespace, extent: Extent) -> None:
    """Measures seconds and bytes by number of parameters, in one process."""
    dtype = DTYPES[args.dtype]
    times = {}
    seconds, nbytes = [], []
    for name in extent.planned:
        n = growth.elements(name)
        live: dict[str, int | None] = {}
        if name in extent.sizes:
            rounds = extent.rounds if n < LARGE else 3
            fits = n < 2 * LARGE
            found = apart(growth.timed, name, args.length, dtype, rounds, fits)
            if fits:
                live = apart(growth.lived, name, args.length, dtype)
            row: dict[str, object] = {
                "parameters": n,
                "tensors": len(shapes_of(growth.MODELS[name])),
            }
            row |= {f"{run} / {unit}": ratio(found, run, unit) for run, unit in PAIRS}
            seconds.append(row | {"rounds": rounds})
            times[n] = found
            print(report.table([row]), flush=True)
        plan = growth.planned(name, args.length, dtype)
        row = {"parameters": n}
        for kept in KEPT:
            most = live.get(kept)
            row |= {kept: most and most / n, f"{kept}, planned": plan[kept] / n}
        nbytes.append(row)

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(10, 4)
        left, right = figure.subplots(1, 2)
        lines: list[Line] = []
        for kept, color in zip(KEPT, (GRAY, BLUE, GREEN, ORANGE), strict=True):
            for key, style, label in ((f"{kept}, planned", "-", kept), (kept, "o", "")):
                at = [row for row in nbytes if row[key]]
                lines.append(
                    ([r["parameters"] for r in at], [r[key] for r in at], style, color, label)
                )
        title = f"most live bytes / parameters, {args.dtype}\n(dots measured, lines planned)"
        panel(left, title, "parameters", lines)
        lines = [
            (
                [n for n, t in times.items() if {*pair} <= t.keys()],
                [middle(t, *pair) for t in times.values() if {*pair} <= t.keys()],
                "o-",
                color,
                " / ".join(pair),
            )
            for pair, color in zip(SHARES, COLORS, strict=True)
        ]
        panel(right, "seconds, as ratios", "parameters", lines, log=True)

    tables = {"Seconds": seconds, "Most live bytes by parameters": nbytes}
    text = PARAMETERS.format(**vars(args))
    report.write(
        "trends_parameters", "Cost against parameters", text, tables, draw, folder=args.out
    )


PARAMETERS = """
Llamas with random {dtype} weights are trained on {length} random tokens, in one process with one
thread, without DeepSpeed. These runs take turns: forward and backward, which free each gradient at
once; the same with AdaLomo's step inside; and the same with torch's fused AdamW after it, with
{dtype} moments. The steps alone use the gradients of the last run: AdamW's; AdaLomo's plain
`step()`; its time on the host (native passes are called and do nothing); and a copy of weights and
gradients, which moves as many bytes as AdaLomo's step in bf16 ([traffic.md](traffic.md)). Ratios
are medians over rounds, with the minimum and maximum in brackets. Seconds are CPU time of the
process, which depends less on other processes.

Live bytes in the second step are counted as in [memory.md](memory.md). The planned bytes come from
`python -m ds_ext plan`, which only needs shapes; other cells are empty for models that were not
run. `none` frees each gradient at once, which is the minimum for any optimizer.
"""


# Ranks.


def of_ranks(args: argparse.Namespace, extent: Extent) -> None:
    """Measures seconds and bytes by number of ranks, real and simulated."""
    engines = {
        run: Engine(run, extent.small, args.length, extent.bucket) for run in (BARE, OURS, ADAMW)
    }
    found = {n: on_ranks(n, growth.in_turns, engines, extent.rounds) for n in extent.real}
    live = {
        (ranks, run): on_ranks(ranks, growth.lived_in, engines[run])
        for ranks in extent.real
        for run in (OURS, ADAMW)
    }
    n = growth.elements(extent.small)
    real = [
        {"ranks": ranks}
        | {
            f"{what}, {run} / {BARE}": ratio(times, run, BARE)
            for what, times in (("seconds", f.seconds), ("CPU seconds", f.cpu))
            for run in (OURS, ADAMW)
        }
        | {f"live bytes / parameters, {run}": live[ranks, run] / n for run in (OURS, ADAMW)}
        for ranks, f in found.items()
    ]
    counted = apart(growth.by_ranks, extent.giant, extent.counted)

    def draw(figure: "Figure") -> None:
        panels = three(figure)
        colors = {OURS: BLUE, ADAMW: ORANGE}
        at = list(found)
        lines: list[Line] = [
            (at, [middle(f.seconds, run, BARE) for f in found.values()], "o-", color, run)
            for run, color in colors.items()
        ]
        lines += [
            (at, [middle(f.cpu, run, BARE) for f in found.values()], ":", color, f"{run}, CPU")
            for run, color in colors.items()
        ]
        panel(panels[0], f"seconds / {BARE}\n{extent.small}, real ranks", "ranks", lines)
        panel(panels[1], *rounds_of(counted, "ranks", extent))
        lines = [
            (at, [live[d, run] / n for d in at], "o-", color, f"{run}, {extent.small}")
            for run, color in colors.items()
        ]
        for name, color in (("AdaLomo", BLUE), (memory.ADAMW, ORANGE)):
            kept = [row[f"{name}, bytes a parameter"] for row in counted]
            at = [row["ranks"] for row in counted]
            lines.append((at, kept, "--", color, f"{name}, {extent.giant}, planned"))
        panel(panels[2], "bytes of a rank / parameters", "ranks", lines, log=True)

    tables = {"Real ranks": real, "Simulated ranks": counted}
    text = RANKS.format(**vars(args), **extent._asdict(), link=growth.LINK, bare=BARE)
    report.write("trends_ranks", "Cost against ranks", text, tables, draw, folder=args.out)


def rounds_of(
    rows: Sequence[Mapping[str, Any]], along: str, extent: Extent
) -> tuple[str, str, list[Line]]:
    """Draws a panel with the share of rounds in a step, by the time model."""
    at = [row[along] for row in rows]
    lines: list[Line] = [
        (at, [row[f"rounds / step, {how}"] for row in rows], style, BLUE, how)
        for how, style in zip(links.ALGORITHMS, ("-", ":"), strict=True)
    ]
    return f"rounds / step, {extent.giant}\n(a model of time)", along, lines


RANKS = """
Real ranks (gloo) on this machine train the Llama "{small}" in fp32 under DeepSpeed's ZeRO-3, each
on {length} random tokens and with one thread: with AdaLomo, with torch's AdamW (`"torch_adam":
true`), and with "{bare}", an engine that steps one vector and drops all other gradients. Their
steps take turns in {rounds} rounds. Ratios are medians, with the minimum and maximum in brackets.
CPU seconds are the sum over all ranks. Unlike wall time they do not include waiting: if there are
more ranks than cores, ranks wait for their turns. Live bytes are the largest peak of any rank in
its second step, including gathered weights and activations. `reduce_bucket_size` is {bucket:,}.

Simulated ranks step the Llama "{giant}" in bf16. ds_ext's code is counted on tensors without
storage as in [scale.md](scale.md), which describes the time model: {link}, 4,096 tokens per rank
and 4e14 flops per second are **assumed, not measured**. Bytes are those of the planner: weights,
state and gradients in flight, without activations. AdamW's peak is in the step, when no gradients
are in flight, so with many ranks the two peaks occur at different times.
"""


# Buckets.


def of_buckets(args: argparse.Namespace, extent: Extent) -> None:
    """Measures seconds and bytes by reduce_bucket_size, on two real ranks and simulated ones."""
    engines = {
        f"{size:,}": Engine(OURS, extent.small, args.length, size) for size in extent.buckets
    }
    unit = {BARE: Engine(BARE, extent.small, args.length, extent.bucket)}
    found = on_ranks(2, growth.in_turns, unit | engines, extent.rounds)
    live = {label: on_ranks(2, growth.lived_in, engine) for label, engine in engines.items()}
    n = growth.elements(extent.small)
    counted = apart(growth.by_buckets, extent.small, 2, extent.buckets)
    wide = apart(growth.by_buckets, extent.giant, AMONG, extent.larger)
    keys = ("reduce_bucket_size", "buckets", "rounds", "calls")
    real = [
        {key: row[key] for key in keys}
        | {f"seconds / {BARE}": ratio(found.seconds, label, BARE)}
        | {f"CPU seconds / {BARE}": ratio(found.cpu, label, BARE)}
        | {"live bytes / parameters": live[label] / n}
        for row, label in zip(counted, engines, strict=True)
    ]

    def draw(figure: "Figure") -> None:
        panels = three(figure)
        along, real_ranks = "reduce_bucket_size", f"{extent.small}, 2 real ranks"
        lines: list[Line] = [
            (extent.buckets, [middle(times, size, BARE) for size in engines], style, BLUE, what)
            for what, times, style in (("seconds", found.seconds, "o-"), ("CPU", found.cpu, ":"))
        ]
        panel(panels[0], f"seconds / {BARE}\n{real_ranks}", along, lines)
        panel(panels[1], *rounds_of(wide, along, extent))
        flight = [row["gradients in flight, bytes a parameter"] for row in wide]
        lines = [
            (
                extent.buckets,
                [live[b] / n for b in engines],
                "o-",
                BLUE,
                f"{real_ranks}, all",
            ),
            (extent.larger, flight, "--", GRAY, f"{extent.giant}, {AMONG} ranks, gradients"),
        ]
        panel(panels[2], "bytes of a rank / parameters", along, lines)

    tables = {"Two real ranks": real, f"{AMONG} simulated ranks": wide}
    text = BUCKETS.format(
        **vars(args), **extent._asdict(), link=growth.LINK, among=AMONG, bare=BARE
    )
    report.write(
        "trends_buckets", "Cost against reduce_bucket_size", text, tables, draw, folder=args.out
    )


BUCKETS = """
Two real ranks (gloo) on this machine train the Llama "{small}" in fp32 under DeepSpeed's ZeRO-3
with AdaLomo, each on {length} random tokens and with one thread. Times are relative to "{bare}", an
engine that steps one vector and drops all other gradients. Steps take turns in {rounds} rounds.
Ratios are medians, with the minimum and maximum in brackets. CPU seconds are the sum over both
ranks. Buckets, rounds and calls are counted on tensors without storage. Live bytes are the largest
peak of any rank in its second step.

{among} simulated ranks step the Llama "{giant}" in bf16, counted as in [scale.md](scale.md), which
describes the time model: {link}, 4,096 tokens per rank and 4e14 flops per second are **assumed, not
measured**.
"""

TRENDS: dict[str, Callable[[argparse.Namespace, Extent], None]] = {
    "parameters": of_parameters,
    "ranks": of_ranks,
    "buckets": of_buckets,
}
