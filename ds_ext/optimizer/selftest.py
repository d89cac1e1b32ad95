"""Compares native code or kernels with the reference executor, by steps of small tensors.

The first time that an optimizer runs on a GPU, ``failure`` checks its rules with their settings in
a process of their own, so that an access out of bounds ends only that process. The result is kept
in the cache folder, for each GPU and its software.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_ext import rules
from ds_ext.logs import logger
from ds_ext.ops.exchange import Exchanges
from ds_ext.ops.executors import tables, unbatched
from ds_ext.ops.executors.native import library
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves
from ds_ext.optimizer.ema import EmaConfig
from ds_ext.optimizer.nonfinite import GradCheck
from ds_ext.optimizer.param_table import ParamTable
from ds_ext.optimizer.sections import SectionConfig
from ds_ext.optimizer.updates import RunUpdate

Case = Sequence[Any]  # the name of a rule, its hyper-parameters, a key of DTYPES
Row = dict[str, Any]

RIGHT, WRONG = "right", "WRONG"
CHECKED = {"cuda"}  # types of devices on which an optimizer is checked before its first step
SECONDS = 300  # after which a process that checks is ended
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_16_BITS = ("stochastic", "nearest", "master", "master24")
MATRICES = ((48, 64), (33, 130))  # rows with and without vectors of 16 bytes
OTHER_SHAPES = ((3, 16, 40), (300,), (5,))
RANKS = ((0, 1), (1, 3))  # (rank, ranks): whole parameters, and a run in their middle
STEPS = 2
CLOSE = 1e-5  # error relative to the norm of the update, of fp32 weights and masters; of states
CLOSE_24 = 1e-3  # the same of "master24", whose 8 bits may be rounded either way
CLOSE_PRODUCTS = 0.1  # the same of updates by matrix products, whose operands may be bf16
APART = 1 / 200  # share of 16-bit weights, or codes of states, that may be rounded either way
# Hyper-parameters with which small tensors show an error; those that are not checked; and those
# that ask for other forms of passes than the defaults.
SMALL: dict[str, Any] = {"lr": 0.01, "rank": 4, "update_proj_gap": 2}
LEFT_OUT = {f.name for kind in (EmaConfig, SectionConfig) for f in dataclasses.fields(kind)}
OTHERS = {"relative_step": False, "weight_decay": 0.1, "beta1": 0.9, "momentum": 0.9, "nbits": 32}
OF_OTHERS = "weights of other ranks"
REPORT = "selftest: "  # begins each line that a process prints for the one that has started it
LATE = "it took longer than"
# Signals by which a user, a scheduler, or a host without memory ends a process.
STOPPED = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}
PACKAGE = Path(__file__).parents[1]


class Unavailable(ValueError):
    """A process of its own cannot check the device; the message says why."""


def cases_of(table: ParamTable) -> list[Case]:
    """Returns the cases of an optimizer's param groups: their rules of ds_ext, and their dtypes."""
    found: list[Case] = []
    names = {dtype: name for name, dtype in DTYPES.items()}
    for i, group in enumerate(table.index.groups):
        rule = table.rule_at(i)
        hypers = {k: v for k, v in dataclasses.asdict(rule).items() if k not in LEFT_OUT}
        hypers |= {k: v for k, v in SMALL.items() if hypers.get(k) is not None}
        is_ours = rules.entry_of(type(rule)).is_own
        for dtype in dict.fromkeys(p.dtype for p in group["params"] if is_ours):
            case = [type(rule).__name__.lower(), hypers, names.get(dtype)]
            if dtype in names and case not in found:
                found.append(case)
    return found


def all_cases(kind: type[Any]) -> list[Case]:
    """Returns the cases of an optimizer class: dtypes, ways to store weights, forms of passes."""
    fields = {field.name for field in dataclasses.fields(kind.hypers)}
    given = {k: v for k, v in SMALL.items() if k in fields}
    others = given | {k: v for k, v in OTHERS.items() if k in fields}
    if "relative_step" in fields:
        del given["lr"]
    name, cases = kind.__name__.lower(), list[Case]()
    for dtype in DTYPES:
        for storage in IN_16_BITS if dtype != "fp32" else ("nearest",):
            cases.append([name, given | {"weight_update": storage}, dtype])
        cases.append([name, others, dtype])
    return cases


class Alone:
    """The collectives of a rank whose other ranks send zeros."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, sums: Tensor) -> None:
        """Leaves ``sums`` as they are: the sums of other ranks are zeros."""

    def exchange(self, exchanges: Exchanges) -> None:
        """Delivers what this rank sends to itself, and zeros."""
        flat, sizes, received = exchanges.packed(self.ranks)
        parts = [flat.new_zeros(n) for n in received]
        parts[self.rank] = flat.split(sizes)[self.rank]
        exchanges.deliver(parts)


class Steps(NamedTuple):
    """Steps of small parameters by one rank's optimizer. Sums are this rank's own."""

    tensors: list[list[dict[str, Tensor]]]  # ``tensors_of`` the parameters before and after steps
    are_checked: bool  # whether passes check the gradients of all steps but the first
    bad: list[int]  # positions of the parameters whose last gradients passes found bad


def stepped(
    kind: type[Any], case: Case, ranks: Sequence[int], device: torch.device, has_nan: bool = False
) -> Steps:
    """Makes STEPS steps, and another one if passes can check the gradients of batches.

    With ``has_nan``, the gradient of the first parameter then has a NaN in the middle of its run.
    """
    _, hypers, dtype = case
    shapes = MATRICES + OTHER_SHAPES if rules.entry_of(kind.rule).any_shape else MATRICES
    like = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    normal = functools.partial(torch.randn, **like, dtype=torch.float32)
    params = [nn.Parameter((0.1 * normal(s)).to(device, DTYPES[dtype])) for s in shapes]
    optimizer = kind(params, **hypers)
    shards: dict[Tensor, Shard] = {
        p: dataclasses.replace(Shard.of_rank(tuple(p.shape), *ranks), turn=ranks[0]) for p in params
    }
    are_checked = optimizer.in_batches(shards, params[0].device) == shards.keys()
    tensors = [[tensors_of(optimizer, p, shards[p]) for p in params]]
    bad: list[Tensor] = []
    for i in range(STEPS + are_checked):
        grads = [normal(s).to(device, DTYPES[dtype]) for s in shapes]
        if has_nan and i == STEPS:
            shard = shards[params[0]]
            grads[0].view(-1)[shard.start + len(shard) // 2] = math.nan
        each = [(p, own, _run(g, own)) for (p, own), g in zip(shards.items(), grads, strict=True)]
        updates = [RunUpdate(p, _run(p, own), g, own) for p, own, g in each]
        check = None
        if are_checked and i > 0:  # as backward does on a GPU, with this rank's own votes
            first = optimizer.first_round_checks(shards)
            votes = {p: torch.where(g.sum().isfinite(), 1.0, 2.0**20) for p, _, g in each}
            check = GradCheck(first, {p: vote for p, vote in votes.items() if p not in first})
        optimizer.update(updates, Alone(*ranks), check)
        optimizer.commit_weight_norms()
        bad = check.flags.read()[0] if check is not None else []
        optimizer.rollback_step(bad)
        tensors.append([tensors_of(optimizer, p, shards[p]) for p in params])
    return Steps(tensors, are_checked, [i for i, p in enumerate(params) if p in {*bad}])


def _run(values: Tensor, shard: Shard) -> Tensor:
    """A rank's run of the values of a parameter."""
    return values.detach().view(-1)[shard.start :][: len(shard)]


def tensors_of(optimizer: ParamTable, p: Tensor, shard: Shard) -> dict[str, Tensor]:
    """Copies of a parameter's state, of its weights with masters, and of other ranks' ones.

    Weights are on the CPU: those with masters are there, those of no step yet are not.
    """
    state = {k: v for k, v in optimizer.state.get(p, {}).items() if k != "master"}
    found = dict[str, Tensor]()
    for keys, x in leaves(state):
        x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")
        found[".".join(keys)] = x.clone()
    held = optimizer.weights(p, _run(p, shard), shard)
    others = p.detach().flatten().clone()
    _run(others, shard).zero_()
    return found | {"weights": held.to("cpu", copy=True), OF_OTHERS: others}


@torch.no_grad()
def check(kind: type[Any], case: Case, ranks: Sequence[int], device: torch.device) -> Row:
    """Returns whether steps equal the reference's, and how far apart they are.

    A second run must have the bits of the first. A NaN must change no bit of its parameter, and
    keep no other from its step.
    """
    entry = rules.entry_of(kind.rule)
    first, again = (stepped(kind, case, ranks, device, has_nan) for has_nan in (False, True))
    with unbatched.reference_only():
        before, *_, expected = stepped(kind, case, ranks, device).tensors
    found = first.tensors[STEPS]
    wrong = {
        "native code and kernels are disabled or missing": not tables.supports(device),
        "other bits in a second run": not _same(found, again.tensors[STEPS]),
        "a NaN in a gradient": first.are_checked and not _skips_nan(first, again),
    }
    row, error = row_of(case, ranks), 0.0
    exact = row["dtype"] == "fp32" or row["weight_update"] == "master"
    of_weights = CLOSE if exact else CLOSE_24 if row["weight_update"] == "master24" else None
    limits = {"weights": of_weights if entry.is_batched else CLOSE_PRODUCTS, OF_OTHERS: 0.0}
    for key in dict.fromkeys(itertools.chain(*expected)):
        a, b, old = ([x[key] for x in of if key in x] for of in (found, expected, before))
        limit, scale = limits.get(key, CLOSE), b
        if key == "weights":
            scale = [y.double() - w for y, w in zip(b, old, strict=True)]
            error = max(_norm(x, y) / (_norm(u) or 1) for x, y, u in zip(a, b, scale, strict=True))
        wrong[key] = len(a) != len(b) or not _is_near(a, b, scale, limit)
    named = [key for key, is_wrong in wrong.items() if is_wrong]
    verdict = f"{WRONG}: {', '.join(named)}" if named else RIGHT
    return row | {"error": error, "verdict": verdict}


def row_of(case: Case, ranks: Sequence[int]) -> Row:
    """Returns the first columns of a row."""
    name, hypers, dtype = case
    row = {"optimizer": name, "dtype": dtype, "rank": f"{ranks[0]} of {ranks[1]}"}
    return row | {"weight_update": hypers.get("weight_update", "stochastic")}


def _skips_nan(clean: Steps, hit: Steps) -> bool:
    """Whether passes step all but the parameter whose last gradient has a NaN, and report it."""
    expected, (*_, before, found) = clean.tensors[-1], hit.tensors
    is_kept = _same(found[:1], before[:1]) and not _same(expected[:1], before[:1])
    return is_kept and _same(found[1:], expected[1:]) and hit.bad == [0]


def _same(a: Iterable[Mapping[str, Tensor]], b: Iterable[Mapping[str, Tensor]]) -> bool:
    """Whether states and weights of parameters have the same bits."""
    return all(
        x.keys() == y.keys() and all(map(torch.equal, x.values(), y.values()))
        for x, y in zip(a, b, strict=True)
    )


def _is_near(
    a: Sequence[Tensor], b: Sequence[Tensor], scale: Sequence[Tensor], limit: float | None
) -> bool:
    """Whether tensors are equal within ``limit`` of the norm of ``scale``.

    Of codes, and of weights without a limit, a few may be rounded to a neighbour.
    """
    if limit is None or not b[0].is_floating_point():
        apart = sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))
        return apart <= APART * sum(x.numel() for x in a)
    return all(_norm(x, y) <= limit * _norm(u) for x, y, u in zip(a, b, scale, strict=True))


def _norm(a: Tensor, b: Tensor | float = 0.0) -> float:
    return float((a.double() - b).norm())


def check_all(kinds: Mapping[str, type[Any]], cases: Iterable[Case], device: torch.device) -> None:
    """Checks cases in this process, and prints rows for the process in ``in_child``."""
    torch.ones(1, dtype=torch.float32, device=device).item()  # fails if it serves no other process
    print(REPORT, flush=True)
    for case, ranks in itertools.product(cases, RANKS):
        print(REPORT + json.dumps(check(kinds[case[0]], case, ranks, device)), flush=True)


def in_child(cases: Sequence[Case], device: torch.device, imports: Sequence[str] = ()) -> list[Row]:
    """Returns the rows of cases, checked in a new process until it ends or the time is over.

    The process first imports the modules ``imports``, because they register optimizers.

    Raises:
        Unavailable: a new process cannot use the device.
    """
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    env["CUDA_LAUNCH_BLOCKING"] = "1"  # an error is that of the case in progress
    options = ["--device", str(device), "--cases", json.dumps(cases, default=str)]
    options += [f"--import={module}" for module in imports]
    command = [sys.executable, "-m", "ds_ext", "selftest", *options]
    status = 0
    try:
        done = subprocess.run(command, env=os.environ | env, capture_output=True, timeout=SECONDS)
        out, status = done.stdout, done.returncode
        lines = done.stderr.decode(errors="replace").splitlines()
        last = next((line[:200] for line in lines[::-1] if "Error" in line), "")
        why = f"the process ended with status {status}: {last}"
    except subprocess.TimeoutExpired as error:
        out, why = error.stdout or b"", f"{LATE} {SECONDS} s"
    except OSError as error:
        raise Unavailable(str(error)) from None
    printed = out.decode(errors="replace").splitlines()
    reports = [line.removeprefix(REPORT) for line in printed if line.startswith(REPORT)]
    rows: list[Row] = [json.loads(report) for report in reports[1:]]
    left = [*itertools.product(cases, RANKS)][len(rows) :]
    # Without reports, the GPU serves one process only, or Python's environment differs.
    if left and reports and -status not in STOPPED and "out of memory" not in why:
        rows.append(row_of(*left[0]) | {"error": math.inf, "verdict": f"{WRONG}: {why}"})
    elif left and all(row["verdict"] == RIGHT for row in rows):  # else what is wrong counts
        raise Unavailable(why)
    return rows


def versions(device: torch.device) -> dict[str, str]:
    """Returns the device and the software that results depend on."""
    found = {"device": str(device), "driver": "none", "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        with suppress(OSError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
    for name in ("triton", "ds_ext"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def failure(table: ParamTable, device: torch.device) -> str:
    """Returns what is wrong with the kernels of an optimizer; "" if they are right or unchecked.

    Checks them in a new process unless the result is kept in the cache folder.
    """
    cases = cases_of(table) if device.type in CHECKED else []
    if not cases:
        return ""
    software, names = versions(device), ", ".join(sorted({case[0] for case in cases}))
    sources = sorted([*PACKAGE.glob("ops/**/*.py"), *PACKAGE.glob("rules/*.py")])
    key = [json.dumps([software, cases], default=str).encode(), *map(Path.read_bytes, sources)]
    name = f"selftest-{hashlib.sha256(b''.join(key)).hexdigest()[:16]}.json"
    try:
        path, own = library.cache_file(name)
        if own is None:
            rows = json.loads(path.read_bytes()[: -library.HASH_BYTES])
        else:
            began = time.monotonic()
            with own:
                rows = in_child(cases, device)
                if not any(LATE in row["verdict"] for row in rows):  # else a slow machine, perhaps
                    with suppress(OSError):  # a full disk: the next start checks again
                        new = Path(own.name) / name
                        new.write_text(json.dumps(rows))
                        library.seal(new).replace(path)
            seconds = time.monotonic() - began
            logger.info("kernels of %s checked on %s in %.0f s: %s", names, device, seconds, path)
    except (Unavailable, OSError) as error:
        logger.info("kernels of %s not checked on %s: %s", names, device, error)
        return ""
    row = next((row for row in rows if row["verdict"] != RIGHT), None)
    if row is None:
        return ""
    return (
        f"the kernels of {row['optimizer']} are not right on this GPU, so PyTorch's operations "
        f"step all parameters on all ranks, slower: {row['dtype']}, {row['weight_update']!r}, rank "
        f"{row['rank']}: {row['verdict']}. {software}. Please "
        "open an issue of ds_ext with this line and the table of `python -m ds_ext selftest`. To "
        f"check again, delete {path}."
    )
