"""Compiles the kernels of the later stages into Triton's cache, in many processes.

The stages' own steps run first, with launches that do nothing but note their constants. A process
compiles a second per kernel, so 16 of them save the other stages minutes.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ds_ext
from benchmarks import host_gpu
from benchmarks.gpu import checks, launch_order, training_memory
from benchmarks.gpu.setting import RIGHT, WRONG, Rows, Setting, using_kernels
from benchmarks.memory import OURS, Sizes, llama
from ds_ext.backward import owners, startup_log
from ds_ext.ops.executors.triton import launches
from ds_ext.ops.executors.triton.launches import KernelConstants, Launch

Asked = tuple[int, dict[str, Any]]  # warps, constants
ROOT = Path(__file__).parents[2]


def rows(on: Setting) -> Rows:
    """Compiles, and reports how many kernels and seconds it took, and what did not compile."""
    asked = distinct(asked_for(on))[: on.kernels]
    began = time.perf_counter()
    processes = [_begin(asked[i :: on.processes]) for i in range(on.processes)]
    failed = [line for process in processes for line in _ended(process)]
    for line in failed:
        yield "Failed", {"kernel and error": line, "verdict": WRONG}
    yield (
        "Compiled",
        {
            "kernels": len(asked),
            "failed": len(failed),
            "processes": on.processes,
            "s": time.perf_counter() - began,
            "verdict": WRONG if failed or not asked else RIGHT,
        },
    )


def asked_for(on: Setting) -> list[Asked]:
    """What the checks and the training steps of later stages launch."""
    found: list[Asked] = []

    def note(launch: Launch, *args: object) -> None:
        found.append((launch.warps, dict(launch.named)))

    with using_kernels(on.device.type), mock.patch.object(launches, "launch_kernel", note):
        for name in on.optimizers or checks.BATCHED:
            for case in checks.cases():
                for together in (True, False):
                    made = checks.Stepped(name, *case, on.check_shapes, on.device, together)
                    made.steps(2)
            for dtype in checks.DTYPES:  # gradients that kernels check
                for ranks in checks.RANKS:
                    storage = checks.storage_with_nan(dtype)
                    made = checks.Stepped(name, dtype, storage, ranks, on.check_shapes, on.device)
                    _checked(made)
        for sizes, names in (
            (on.small, launch_order.OPTIMIZERS),
            (on.large, training_memory.OPTIMIZERS),
        ):
            for name in on.some(names):
                _in_backward(name, sizes, on.device)
                gc.collect()  # two models of 7B and their states may not fit
    return found


def _checked(made: checks.Stepped) -> None:
    """Makes two steps whose gradients are checked, without the values that a launch would write."""
    if not made.is_in_kernels():
        return
    read = (mock.Mock(bad=[]), [])
    with mock.patch.object(checks.DeviceGradFlags, "read", lambda self, *_: read):
        for _ in range(2):
            made.step(checked=True)


def _in_backward(name: str, sizes: Sizes, device: torch.device) -> None:
    """Makes two steps of a model inside backward, of memory that nobody reads or writes."""
    model = llama(sizes, torch.bfloat16, torch.device("meta")).to_empty(device=device)
    optimizer = OURS[name].for_model(model)
    read = (mock.Mock(square=1.0, bad=[]), [1.0])
    with (
        mock.patch.object(torch, "full", host_gpu.empty),
        mock.patch.object(startup_log, "warnings", lambda *_, **__: []),
        mock.patch.object(owners, "may_reach_others", lambda by: False),  # no pass is in progress
        mock.patch.object(checks.DeviceGradFlags, "read", lambda self, *_: read),
    ):
        fused = ds_ext.fuse_into_backward(model, optimizer)
        for _ in range(2):
            for param in reversed(list(model.parameters())):
                param.grad = torch.empty_like(param)
                fused.buckets.take(param)
            optimizer.step()
        fused.remove()


def distinct(asked: Iterable[Asked]) -> list[Asked]:
    """The launches that Triton compiles kernels of their own for."""
    found: dict[object, Asked] = {}
    for warps, named in asked:
        found.setdefault((warps, *map(repr, named.values())), (warps, named))
    return list(found.values())


def _begin(asked: list[Asked]) -> "subprocess.Popen[str]":
    """A process that compiles; kernels imported for Triton's interpreter could not be compiled."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    written = [[warps, {key: plain(x) for key, x in of.items()}] for warps, of in asked]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.compiler", str(10 * major + minor)],
        cwd=ROOT,
        env={key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(written))
    process.stdin.close()
    return process


def _ended(process: "subprocess.Popen[str]") -> Iterator[str]:
    """The lines of a process, and one if it has failed itself."""
    assert process.stdout is not None
    yield from process.stdout.read().splitlines()
    if process.wait():
        yield f"a process ended with status {process.returncode}"


def plain(value: Any) -> Any:
    """A constant as JSON may have it: a dtype by its name."""
    if isinstance(value, KernelConstants):
        return {name: plain(x) for name, x in value.fields.items()}
    return getattr(value, "name", value)


def given(value: Any) -> Any:
    """The inverse of ``plain``."""
    if isinstance(value, dict):
        return KernelConstants(**{name: given(x) for name, x in value.items()})
    tl = importlib.import_module("triton.language")
    types = {t.name: t for t in (tl.float32, tl.bfloat16, tl.float16, tl.int16, tl.int8)}
    return types.get(value, value)
