"""Kernels launch where their tensors are, whichever device is the current one. PyTorch's operations
on a GPU: how many, in how much memory, and without waiting for the device."""

import contextlib
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_ext
from ds_ext.ops import block_sizes
from ds_ext.ops.executors.triton import launches
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.rules import REGISTRY
from tests.common import needs, paths
from tests.common.choose import crossed
from tests.common.states import tensors
from tests.worlds import ROOT

HERE, THERE = torch.device("cpu"), torch.device("meta")


@needs.triton
def test_the_current_device_is_the_tensors_own(monkeypatch):
    entered = []

    class Tensors:
        device = torch.device("cuda", 1)

    @contextlib.contextmanager
    def device(given):
        entered.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    with launches.current(Tensors.device):
        pass
    with launches.current(HERE):
        pass
    assert entered == [torch.device("cuda", 1)]


class Compiled:
    """A kernel as Triton hands it out: launched by ``[grid](all arguments in their order)``."""

    def __init__(self, given):
        self.given, self.calls = given, []

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, *args))


class Function:
    """A kernel that Triton compiles when it is launched."""

    arg_names = ("rows", "count", "COUNT", "P")

    def __init__(self):
        self.made = []

    def __getitem__(self, grid):
        def launch(rows, count, *, num_warps, enable_fp_fusion, **named):
            self.made.append(Compiled((grid, rows, num_warps, named)))
            return self.made[-1]

        return launch


@needs.triton
def test_compiled_kernels_are_kept(monkeypatch):
    """By what Triton compiles another for: constants, warps and device, but not arguments."""
    function = Function()
    monkeypatch.setattr(launches._kernels(), "run", function)
    monkeypatch.setattr(launches, "_compiled", {})
    kind = launches.KernelConstants(name="apply", TC=128)
    one, two, four = (
        launches.Launch(kind, np.zeros((n, 1), dtype=np.int64), 7, warps)
        for warps, n in ((4, 1), (4, 17), (8, 16))
    )
    for _ in range(2):
        for rows, launch, device in ((1, one, HERE), (16, one, HERE), (2, two, HERE)):
            launches.launch_kernel(launch, [rows, 0], device)
        launches.launch_kernel(four, [3, 0], HERE)
        launches.launch_kernel(one, [4, 0], THERE)
    assert [made.given[1] for made in function.made] == [1, 2, 3, 4]
    again = [call for made in function.made for call in made.calls]
    assert all(len(call) == 1 + len(Function.arg_names) for call in again) and len(again) == 6
    assert function.made[0].calls == [((7, 1, 1), rows, 0, 16, kind) for rows in (16, 1, 16)]


def test_a_step_of_several_devices_is_a_step_of_each(monkeypatch):
    """Their sums are not put together: no tensor lies on both."""
    paths.use(monkeypatch, "ops")
    stepped = []
    original = ds_ext.AdaLomo.begin

    def note(self, updates, check):
        stepped.append([u.g.device for u in updates])
        return original(self, updates if updates[0].g.device == HERE else here, check)

    monkeypatch.setattr(ds_ext.AdaLomo, "begin", note)
    params = [nn.Parameter(torch.ones(3, device=d)) for d in (HERE, THERE, HERE, THERE)]
    optimizer = ds_ext.AdaLomo(params)
    updates = [
        RunUpdate(p, p.detach(), torch.ones(3, device=p.device), Shard.whole((3,))) for p in params
    ]
    here = updates[::2]
    assert optimizer.update(updates, Alone()) == 2
    assert stepped == [[HERE, HERE], [THERE, THERE]]


def test_a_model_on_several_devices_is_stepped_after_backward_alone():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, device=THERE)])
    optimizer = ds_ext.AdaLomo(model.parameters())
    with pytest.raises(ValueError, match=r"cpu.*meta.*optimizer\.step\(\)"):
        ds_ext.fuse_into_backward(model, optimizer)


# PyTorch's operations on a GPU.


NO_LAUNCH = {"empty", "empty_like", "new_empty", "detach", "_unsafe_view"}  # and views
DTYPES = (torch.float32, torch.bfloat16)
# Muon iterates on all equal matrices of a bucket together.
LINEAR = sorted(REGISTRY.keys() - {"muon"})
MOST = 256 * 2**20 + 64  # bytes of a step's temporary tensors: blocks, and some numbers


class Operations(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.count += not (func.is_view or "::" in name or name in NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def stepped(name, shape, dtype, n=1):
    """An optimizer of n parameters that has made a step, and its tensors."""
    params = [nn.Parameter(torch.zeros(shape, device="meta", dtype=dtype)) for _ in range(n)]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = OPTIMIZERS[name](params)
    optimizer.step()
    return optimizer, [*params, *(p.grad for p in params), *tensors([*optimizer.state.values()])]


def operations(name, dtype, n):
    optimizer, _ = stepped(name, (512, 512), dtype, n)
    with Operations() as mode:
        optimizer.step()
    return mode.count


def documented():
    """Operations of a parameter in fp32 and in bf16, by optimizer."""
    text = (ROOT / "docs/gpu.md").read_text().partition("## Without kernels")[2]
    rows = re.findall(r"^\| (\w[\w-]*) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {name.lower().replace("-", ""): (int(a), int(b)) for name, a, b in rows}


def test_the_documentation_has_a_row_for_each_optimizer():
    assert sorted(documented()) == LINEAR


@pytest.mark.parametrize("name", LINEAR)
def test_a_parameter_takes_about_the_documented_number_of_operations(name):
    for dtype, expected in zip(DTYPES, documented()[name], strict=True):
        found = (operations(name, dtype, 3) - operations(name, dtype, 1)) / 2
        assert abs(found - expected) <= 2 + expected / 20, dtype


@pytest.mark.parametrize("name, dtype", crossed(OPTIMIZERS, zip(DTYPES)))
def test_a_step_reads_no_number_of_the_device_and_needs_little_memory(name, dtype):
    optimizer, kept = stepped(name, (4 * 4096, 6144), dtype)  # twelve blocks
    assert kept[0].numel() == 12 * block_sizes.SLICE
    with LiveMemory(kept) as watch:
        before = watch.now
        optimizer.step()
    if name != "muon":  # whose products need memory of the matrix's size
        assert watch.most - before <= MOST
    optimizer.zero_grad()
