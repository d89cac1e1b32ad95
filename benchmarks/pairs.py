"""Time of GaLore's, APOLLO's and Muon's step relative to that of their authors' code.

Both of a pair step the same bf16 matrices with the same gradients, in turns, with one thread and
with several. The authors' code is galore_torch, apollo_torch and ``torch.optim.Muon``.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import report
from benchmarks.memory import LLAMAS, shapes_of
from benchmarks.step import NEVER, RANK, Case, Make, Size, measure, ours, published_galore
from ds_ext.optimizer import OPTIMIZERS

LAYERS = 3


def matrices() -> Size:
    """Returns the matrices of some layers of SmolLM2-135M, without its embedding."""
    shapes = list(shapes_of(LLAMAS["135M"]).items())
    names = tuple(f".{i}." for i in range(LAYERS))
    return Size(tuple(s for name, s in shapes if len(s) == 2 and any(n in name for n in names)))


def published_apollo(case: Case) -> Callable[[], object]:
    from apollo_torch import APOLLOAdamW

    keys = {"rank": RANK, "update_proj_gap": NEVER, "scale": 1.0, "proj": "random"}
    group = {"params": case.params, **keys, "proj_type": "std", "scale_type": "channel"}
    return APOLLOAdamW([group], lr=1e-3).step


# By optimizer: ours, the name of the authors' code, and that.
PAIRS: dict[str, tuple[Make, str, Make]] = {
    "GaLoreAdamW": (
        ours(OPTIMIZERS["galoreadamw"], "stochastic"),
        "galore_torch",
        published_galore,
    ),
    "APOLLO": (
        lambda case: OPTIMIZERS["apollo"](case.params, rank=RANK, update_proj_gap=NEVER).step,
        "apollo_torch",
        published_apollo,
    ),
    "Muon": (
        ours(OPTIMIZERS["muon"], "stochastic"),
        "torch.optim.Muon",
        lambda case: torch.optim.Muon(case.params, lr=1e-3).step,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="threads of torch")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--optimizers", nargs="+", choices=PAIRS, default=list(PAIRS))


def main(args: argparse.Namespace) -> None:
    """Times all pairs, and writes the table."""
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.optimizers:
            rows.append(row(name, threads, args.rounds))
            print(report.table(rows[-1:]), flush=True)
    report.write("pairs", "Steps beside those of the authors' code", TEXT, {"Pairs": rows})


TEXT = f"""
A pair steps the {len(matrices().shapes)} matrices of {LAYERS} layers of SmolLM2-135M in bf16: ours
with its default, stochastic rounding. GaLore and APOLLO have rank {RANK}, and a projection that is
not renewed. Times are medians over rounds, in milliseconds. `ratio` is ours relative to the other's
in the same round: the median over rounds, and the minimum. With one thread, times are CPU seconds
of the process, which exclude other processes; with several they are wall seconds.
"""


def row(name: str, threads: int, rounds: int) -> dict[str, object]:
    """Returns the times of a pair, and their ratio."""
    own, authors, theirs = PAIRS[name]
    case = Case(matrices(), "bf16")
    clock = time.thread_time if threads == 1 else time.perf_counter
    made: dict[str, Make] = {"ours": own, authors: theirs}
    times = measure(case, made, rounds, clock)
    median, least = report.ratios(times, authors)["ours"]
    medians = {name: 1e3 * statistics.median(of) for name, of in times.items()}
    return {
        "optimizer": name,
        "threads": threads,
        "ours, ms": medians["ours"],
        "authors' code": authors,
        "its ms": medians[authors],
        "ratio": median,
        "least": least,
    }
