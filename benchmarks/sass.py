"""Counts the instructions of the kernels of a 7B step, compiled for an H100 that need not be here.

A step of Llama-7B's bf16 weights on torch's device "meta" asks for launches, which do nothing.
Triton compiles each of them for sm_90. Counts are of the SASS, NVIDIA's machine code, as Triton's
own cuobjdump prints it.
"""

import argparse
import datetime
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor, nn

from benchmarks import report, traffic
from benchmarks.host_gpu import NOTHING
from benchmarks.machine_code import LANES, counted
from benchmarks.memory import LLAMAS, shapes_of
from ds_ext.backward import gradient_config
from ds_ext.ops import Scaled
from ds_ext.ops.executors.triton import devices, kernels, launches
from ds_ext.ops.executors.triton.launches import KernelConstants, Launch
from ds_ext.ops.schema import AT
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import GradCheck, GradFlags
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY

PAGE = Path(__file__).parents[1] / "docs/gpu.md"
MARK = "<!-- roofline: written by `python -m benchmarks sass` -->"
END = "<!-- end of roofline -->"
BATCHED = [name for name, entry in REGISTRY.items() if entry.is_batched]
# Multiprocessors, clock under load in Hz (assumed), bytes per second (of the data sheet).
CARDS = {"H100": (132, 1.7e9, 3.35e12), "H200": (132, 1.7e9, 4.8e12)}
REACHED = 0.9  # the share of these bytes that a copy reaches (assumed)
STRIPS = {"weighted_sums"}  # passes over strips of whole rows
FUSED_ADAMW = 14  # bytes per element of torch's, with bf16 moments: g, and p, m, v in and out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--optimizers", nargs="+", choices=BATCHED, default=BATCHED)
    parser.add_argument("--only-print", action="store_true", help="print, and write no file")


def main(args: argparse.Namespace) -> None:
    """Counts each optimizer's passes, and writes the tables."""
    tables = {}
    for name in args.optimizers:
        title = OPTIMIZERS[name].__name__
        tables[title] = [row(one) for one in passes_of_step(name)]
        print(f"{title}\n{report.table(tables[title])}", flush=True)
    tables = {"Roofline": [times(name) for name in args.optimizers], **tables}
    print(report.table(tables["Roofline"]), flush=True)
    if not args.only_print:
        report.write("sass", "Instructions of the kernels of a 7B step", TEXT, tables)
        write_page(tables["Roofline"])


def write_page(rows: Sequence[Mapping[str, object]]) -> None:
    """Writes the roofline and its date into docs/gpu.md."""
    made = f"{report.table(rows)}\n\nTriton {triton.__version__}, {datetime.date.today()}."
    begin, _, rest = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{begin}{MARK}\n{made}\n{END}{rest.partition(END)[2]}")


TEXT = """
A step of Llama-7B's bf16 weights inside backward, in one process, the third; weights are rounded
stochastically. Kernels are compiled for sm_90 and have not run.

The roofline, in milliseconds, is a lower bound by arithmetic, not a measurement. `bytes` is the
time of the memory traffic alone, partial sums included, at 0.9 of the data sheet's rate. `kernels`
adds up, over passes, the longer of this time and of the instructions' time, if every issue slot of
132 multiprocessors at 1.7 GHz were used. Launches, tails and latencies are not in it. `fused AdamW`
is the memory traffic of torch's with bf16 moments, 14 bytes per element.

The table of an optimizer has its passes: `elements` are those of all programs of a step, in
millions; registers of a thread; `spilled`, loads and stores of registers in memory; instructions
that a thread makes for an element. Where a pass loops, they are those of its first inner loop.
`alu` are integer, logic, comparison, selection and packing instructions, `imad` integer products
(of 64 bits: two): each kind has half of the lanes that fp32 sums have. `slow` are roots,
reciprocals and conversions, which have an eighth. Slow paths of divisions and roots, which few
elements take, are counted as `calls` only. `vectors` are global loads and stores of 8 or 16 bytes,
`scalars` all smaller ones, of a thread.
"""


class Asked(NamedTuple):
    """A pass of a step over parameters of one kind."""

    kind: KernelConstants
    warps: int
    programs: int  # of a step
    most: int  # of a launch
    elements: int  # that all programs of a step read, where the pass is one over runs
    padded: int  # elements of their tiles


def row(asked: Asked) -> dict[str, object]:
    """Returns a pass's counts."""
    counts = counted(asked.kind, asked.warps)
    each = counts.of_element(elements_of_thread(asked.kind, asked.warps))
    return {
        "pass": label(asked.kind),
        "programs": asked.programs,
        "elements, M": asked.elements / 1e6,
        "warps": asked.warps,
        "registers": counts.registers,
        "spilled": counts.spilled,
        "calls": counts.calls,
        "per element": each["all"],
        "alu": each["alu"],
        "imad": each["imad"],
        "slow": each["slow"],
        "vectors": counts.hot["vector"],
        "scalars": counts.hot["scalar"],
    }


def label(kind: KernelConstants) -> str:
    """Returns the name of a pass, and what selects its code."""
    forms = {x.value: name for name, x in kernels.FORM.items()}
    shape = [forms[kind.FORM]] if "FORM" in kind.fields else []
    shape += [str(kind.TC)] if kind.name in STRIPS else []
    return " ".join([kind.name, *shape])


def elements_of_thread(kind: KernelConstants, warps: int) -> float:
    """Returns the elements of a thread: of a tile, or of an iteration of a loop."""
    one = kind.fields
    size = one["LONG"] if "LONG" in one else one.get("TR", 1) * one.get("TC", 1)
    return float(max(size / (32 * warps), 1))


def times(name: str) -> dict[str, object]:
    """Returns milliseconds of a step by bytes, and by bytes or instructions of each pass."""
    found: dict[str, object] = {"optimizer": OPTIMIZERS[name].__name__}
    passes = passes_of_step(name)
    elements = sum(math.prod(shape) for shape in shapes_of(LLAMAS["7B"]).values())
    for card, (count, clock, rate) in CARDS.items():
        in_memory = [bytes_of(one) / (REACHED * rate) for one in passes]
        issued = [cycles_of(one) / (count * clock) for one in passes]
        found[f"bytes, {card}"] = sum(in_memory) * 1e3
        found[f"kernels, {card}"] = sum(map(max, in_memory, issued)) * 1e3
        found[f"fused AdamW, {card}"] = FUSED_ADAMW * elements / (REACHED * rate) * 1e3
    return found


def bytes_of(asked: Asked) -> float:
    """Returns the bytes that a pass of a step reads and writes, without single numbers."""
    forms = {x.value: name for name, x in kernels.FORM.items()}
    one = asked.kind
    form = forms[one.FORM] if "FORM" in one.fields else "IS_RUN"
    if one.name == "fold":
        return 8.0 * asked.elements  # partial sums, as they are written and read
    if one.name in ("factors", "clipped_factors"):
        return 20.0 * asked.elements  # statistics in and out, sums, factors
    if one.name == "cached_norm":
        return 8.0 * asked.elements
    each = sum(traffic.STATE.get(form, (0, 0))) + 2 * traffic.MOMENTS.get(one.name, 0)
    is_apply = "apply" in one.name
    reads_weights = is_apply or form == "IS_WEIGHT" or one.fields.get("DECAYS")
    each += 2 * ((form not in ("IS_WEIGHT", "IS_ADAM")) + bool(reads_weights) + is_apply)
    return float(each * asked.elements)


def cycles_of(asked: Asked) -> float:
    """Returns the cycles of a multiprocessor for a pass of a step, by its busiest unit."""
    each = counted(asked.kind, asked.warps).of_element(elements_of_thread(asked.kind, asked.warps))
    elements = max(asked.padded, asked.elements)
    return elements * max(each[unit] / lanes for unit, lanes in LANES.items())


# The launches of a step.


@functools.cache
def launches_of_step(name: str, model: str = "7B") -> list[Launch]:
    """Returns the launches of the third step of an optimizer in backward, of bf16 weights."""
    found: list[Launch] = []
    weights: list[Tensor] = [
        nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        for shape in shapes_of(LLAMAS[model]).values()
    ]
    with _noted(found):
        optimizer = OPTIMIZERS[name](weights, **({"lr": 1e-3} if name != "adafactor" else {}))
        shards = {p: Shard.whole(tuple(p.shape)) for p in weights}
        first = optimizer.first_round_checks(shards)
        votes = {p: torch.ones((), device="meta") for p in weights if p not in first}
        for _ in range(3):
            found.clear()
            flags = GradFlags()
            for bucket in _buckets(weights):
                updates = []
                for p in bucket:
                    run = p.detach().view(-1)
                    g = Scaled(torch.empty_like(run), torch.ones((), device="meta"))
                    updates.append(RunUpdate(p, run, g, shards[p]))
                with torch.no_grad():
                    optimizer.update(updates, NOTHING, GradCheck(first, votes, flags))
                    optimizer.commit_weight_norms()
    return found


def passes_of_step(name: str, model: str = "7B") -> list[Asked]:
    """Returns the different passes of such a step."""
    found: dict[tuple[KernelConstants, int], list[int]] = {}
    for one in launches_of_step(name, model):
        programs = np.diff(one.rows[:, AT["program"]], append=one.programs)
        own = found.setdefault((one.kind, one.warps), [0, 0, 0, 0])
        own[0] += one.programs
        own[1] = max(own[1], one.programs)
        own[2] += _elements(one.kind.name, one.rows)
        own[3] += _padded(one.kind.fields, one.rows, programs)
    return [Asked(kind, warps, *own) for (kind, warps), own in found.items()]


def _elements(name: str, rows: Any) -> int:
    """The elements that programs of a pass read: those of runs, or partial sums."""
    if name == "fold":
        return int(rows[:, AT["height"]].sum())
    if name in ("factors", "clipped_factors"):
        return int((rows[:, AT["mats"]] * (rows[:, AT["rows"]] + rows[:, AT["cols"]])).sum())
    if name == "cached_norm":
        return int(rows[:, AT["total"]].sum())
    return int(rows[:, AT["n"]].sum())


def _padded(one: Mapping[str, Any], rows: Any, programs: Any) -> int:
    """The elements of the tiles of a pass over runs: 0 for others."""
    if "XD" not in one or "LONG" in one:
        return 0
    height = rows[:, AT["height"]] if one["name"] in STRIPS else one["TR"]
    return int((programs * height * one["TC"]).sum())


@contextmanager
def _noted(found: list[Launch]) -> Iterator[None]:
    """Context in which tensors of "meta" are those of a GPU, and launches are noted."""

    with (
        mock.patch.object(devices, "DEVICES", {"meta"}),
        mock.patch.object(launches, "launch_kernel", lambda one, *_: found.append(one)),
    ):
        yield


def _buckets(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """The buckets of a backward pass, of the default size on a GPU."""
    size = gradient_config.gpu_bucket_size(torch.bfloat16.itemsize)
    bucket: list[Tensor] = []
    for p in reversed(weights):
        if bucket and sum(x.numel() for x in bucket) + p.numel() > size:
            yield bucket
            bucket = []
        bucket.append(p)
    yield bucket
