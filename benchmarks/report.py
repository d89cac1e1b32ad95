"""Functions that all benchmarks use: alternating timings, Markdown tables, and report files.

Times are compared only within a round, because a machine's speed drifts: see ``ratios``.
"""

import datetime
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "deepspeed", "transformers")


def machine() -> str:
    """Returns the hardware, the versions of the packages, and today's date, in words."""
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    cpu = f"{_cpu()}, {_count(cores, 'core')}, {_count(threads, 'thread')} used by torch"
    gpu = _gpu()
    memory = f" ({torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB), " if gpu else ""
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)))
    return f"{gpu}{memory}{cpu}; {versions}; {datetime.date.today()}"


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _cpu() -> str:
    """The CPU model from the kernel, or else from Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _version(name: str) -> str:
    """The version of a package, or an empty string if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns rows as a Markdown table. The first row's keys are the header."""
    keys = list(rows[0])
    lines = [keys, ["---"] * len(keys), *([_cell(row[key]) for key in keys] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.2e}")  # first, because 9.999 rounds to 10.0
    places = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.2e}" if places > 6 else f"{rounded:,.{max(places, 0)}f}"


def interleaved(
    candidates: Mapping[str, Callable[[], None]],
    rounds: int,
    sync: Callable[[], None],
    before: Mapping[str, Callable[[], object]] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Returns the seconds of each candidate in each round, after one round that is not counted.

    The candidates of a round run in turn. The function in ``before``, if any, is called before a
    candidate. ``sync`` waits for the device. ``clock`` returns seconds; the default is wall time.
    """
    now = clock or time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for counted in [False] + [True] * rounds:
        for name, candidate in candidates.items():
            if before is not None:
                before[name]()
            sync()
            began = now()
            candidate()
            sync()
            if counted:
                times[name].append(now() - began)
    return times


def ratios(times: Mapping[str, list[float]], unit: str) -> dict[str, tuple[float, float]]:
    """Returns (median, minimum) over rounds of each candidate's time relative to ``unit``."""
    found = {}
    for name, own in times.items():
        apart = [a / b for a, b in zip(own, times[unit], strict=True)]
        found[name] = (statistics.median(apart), min(apart))
    return found


def write(
    name: str,
    title: str,
    text: str,
    tables: Mapping[str, Sequence[Mapping[str, object]]],
    made: str | None = None,
    folder: Path | None = None,
) -> None:
    """Writes {folder}/{name}.md, and prints its path.

    The default folder is ``RESULTS``. The keys of ``tables`` are their headings. On a GPU, file
    names contain the GPU's name, so that results of several machines do not overwrite each other.
    ``made`` describes the machine, the command and the date, if another process has made the
    measurement.
    """
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(name, folder)
    parts = [f"# {title}", text.strip()]
    for heading, rows in tables.items():
        parts += [f"## {heading}", table(rows)]
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    parts.append(made or f"{machine()}.\nMade by `{command}`.")
    path.write_text("\n\n".join(parts) + "\n")
    print(os.path.relpath(path))


def path_of(name: str, folder: Path | None = None) -> Path:
    """Returns the path of a result file on this machine; see ``write``."""
    suffix = f"_{_gpu().lower().replace(' ', '-')}" if _gpu() else ""
    return (folder or RESULTS) / f"{name}{suffix}.md"
