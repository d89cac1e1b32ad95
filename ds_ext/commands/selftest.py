"""``python -m ds_ext selftest``: whether kernels or native code are right on this machine."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ds_ext.optimizer import OPTIMIZERS, named, selftest

DESCRIPTION = (
    "Compares kernels (on a GPU) or native code (on a CPU) with PyTorch's operations. Each "
    "optimizer steps small tensors: dtypes, ways to store weights, whole parameters and runs of a "
    "rank. Prints a table to paste into a report. The exit code is 1 if anything is wrong."
)
PROCESSES = 8  # at most side by side: each of them compiles kernels


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``selftest``."""
    parser.add_argument("--device", help="by default a GPU if there is one, else the CPU")
    parser.add_argument("--optimizer", nargs="+", metavar="NAME", help="only these optimizers")
    parser.add_argument("--cases", help=argparse.SUPPRESS)  # of a process of ``selftest.in_child``


def run(options: argparse.Namespace) -> int:
    """Prints the table; returns 1 if anything is wrong. ValueError for a wrong option."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {options.device}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {options.device}: PyTorch finds no GPU. Without the option, the CPU's "
            "native code is compared."
        )
    if options.cases:
        selftest.check_all(OPTIMIZERS, json.loads(options.cases), device)
        return 0
    kinds = [named(name, "--optimizer") for name in options.optimizer or OPTIMIZERS]
    print(", ".join(f"{key} {value}" for key, value in selftest.versions(device).items()))
    print("\n| optimizer | dtype | cases | largest error | verdict |\n" + 5 * "| --- " + "|")
    wrong = []
    for rows in rows_of(kinds, device, options.imports):
        for dtype in selftest.DTYPES:
            some = [row for row in rows if row["dtype"] == dtype]
            bad = [row for row in some if row["verdict"] != selftest.RIGHT]
            wrong += bad
            if some:
                largest = f"{max(row['error'] for row in some):.1e}"
                verdict = f"{len(bad)} WRONG" if bad else selftest.RIGHT
                cells = some[0]["optimizer"], dtype, len(some), largest, verdict
                print("|", " | ".join(map(str, cells)), "|", flush=True)
    print()
    for row in wrong:
        print(json.dumps(row))
    return int(bool(wrong))


def rows_of(
    kinds: Sequence[type[Any]], device: torch.device, imports: Sequence[str] = ()
) -> Iterator[list[selftest.Row]]:
    """Yields the rows of all cases of each optimizer class: see ``selftest.in_child``."""
    with ThreadPoolExecutor(max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))) as pool:
        cases = map(selftest.all_cases, kinds)
        yield from pool.map(lambda some: selftest.in_child(some, device, imports), cases)
