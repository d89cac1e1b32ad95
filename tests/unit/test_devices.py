"""Kernels launch where their tensors are, whichever device is the current one. PyTorch's operations
on a GPU: how many, in how much memory, and without waiting for the device. Gradients that kernels
judge there: the host reads what they found once, at the end (test_nonfinite.py has the rounds).
"""

import contextlib
import math
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_ext
from ds_ext.backward import startup_log
from ds_ext.ops import block_sizes
from ds_ext.ops.executors.native import native_table as native_table
from ds_ext.ops.executors.triton import devices, launch_memory, launches
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import mapped
from ds_ext.optimizer import OPTIMIZERS, update_stats
from ds_ext.optimizer.nonfinite import GradFlags
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.rules import REGISTRY
from tests.common import needs, paths, table
from tests.common.choose import crossed
from tests.common.hypers import BATCHED, SIMULATED
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


@pytest.mark.parametrize("name", LINEAR)
def test_a_parameter_takes_about_the_documented_number_of_operations(name):
    assert sorted(documented()) == LINEAR
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


@needs.triton
@pytest.mark.parametrize("ends", ["stepped", "dropped", "let go"])
def test_a_bad_gradient_leaves_no_state_however_its_step_ends(ends, monkeypatch):
    paths.use(monkeypatch, "kernels")
    model = nn.Linear(20, 18)
    optimizer = ds_ext.AdaLomo(model.parameters())
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=1)
    model.weight.register_hook(lambda g: g * math.nan)
    model(torch.ones(2, 20)).square().sum().backward()
    if ends == "stepped":
        optimizer.step()
        assert fused.skipped == 1 and math.isinf(fused.norm)
    elif ends == "dropped":
        optimizer.zero_grad()
    else:
        fused.finish()
        fused.remove()
    assert not optimizer.state.get(model.weight) and optimizer.state[model.bias]["step"] == 1


@needs.triton
@pytest.mark.parametrize("path", ["native", "kernels"])
def test_the_norm_is_known_before_the_step_ends_and_measures_leave_out_bad_gradients(
    path, monkeypatch
):
    paths.use(monkeypatch, path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 18, bias=False), nn.Linear(18, 9, bias=False))
    optimizer = ds_ext.AdaLomo(model.parameters())
    fused = ds_ext.fuse_into_backward(model, optimizer, measure_updates=True, bucket_size=10**6)
    x = torch.randn(4, 20)
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    torch.autograd.backward((x @ weights[0].T @ weights[1].T).square().sum())
    norm = float(torch.nn.utils.get_total_norm([w.grad for w in weights]))
    model(x).square().sum().backward()
    for _ in range(2):
        assert float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) == pytest.approx(norm)
    optimizer.step()
    assert fused.norm == pytest.approx(norm)
    model[0].weight.register_hook(lambda g: g * math.nan)
    model(x).square().sum().backward()
    with pytest.raises(RuntimeError, match="norm of the gradients is not finite"):
        nn.utils.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True)
    optimizer.step()
    rms = float(model[1].weight.detach().square().mean().sqrt())
    assert fused.metrics["weight_rms/0"] == pytest.approx(rms) and fused.skipped == 1
    assert fused.metrics["skipped_parameters"] == 1 and math.isinf(fused.norm)


@needs.triton
@pytest.mark.parametrize("name", BATCHED)
def test_the_host_reads_nothing_before_a_step_ends_and_one_vector_then(name, monkeypatch):
    """Reading a number of ``meta``, which stands for a GPU here, raises an error.

    Nor is native code built, which such a run has no use for.
    """
    paths.use(monkeypatch, "ops")
    monkeypatch.setattr(devices, "DEVICES", {"meta"})
    built = mock.Mock(return_value=True)
    monkeypatch.setattr(native_table, "is_available", built)
    monkeypatch.setattr(launches, "launch_kernel", lambda *_: None)
    model = nn.Sequential(nn.Linear(20, 18, device="meta"), nn.Linear(18, 9, device="meta"))
    groups = [p for p in model.parameters() if name != "scale" or p.dim() == 2]
    for p in set(model.parameters()) - {*groups}:
        p.requires_grad_(False)
    optimizer = ds_ext.optimizer.OPTIMIZERS[name](groups, **SIMULATED[name])
    with mock.patch.object(startup_log, "warnings", lambda *_, **__: []):  # which read weights
        ds_ext.fuse_into_backward(model, optimizer, measure_updates=True)
    monkeypatch.setattr(update_stats, "rms", lambda totals: [{}] * len(totals))
    reads = []
    for _ in range(2):
        model(torch.ones(3, 20, device="meta")).sum().backward()
        with mock.patch.object(
            GradFlags, "read", lambda self, *x: ([], 1.0, reads.append(x) or [1.0])
        ):
            optimizer.step()
    assert len(reads) == 2 and not built.called


@needs.triton
def test_a_step_that_fails_leaves_no_limits_to_the_next(monkeypatch):
    """It lacks memory after the first round, in which a gradient was bad."""
    paths.use(monkeypatch, "kernels")
    shapes = ((16, 16), (16, 16))
    before, bad, good = table.gradients(3, shapes, torch.float32)
    bad[0][3] = math.nan
    sums, calls, failing = launch_memory.Memory.sums, [], []

    def counted(self, *args):
        calls.append(args)
        if len(calls) in failing:
            raise torch.OutOfMemoryError("no memory")
        return sums(self, *args)

    monkeypatch.setattr(launch_memory.Memory, "sums", counted)

    def trained(fails):
        ps = [nn.Parameter(w) for w in table.weights(shapes, torch.float32)]
        optimizer = ds_ext.CAME(ps, lr=0.02)
        module = nn.ParameterList(ps)
        ds_ext.fuse_into_backward(module, optimizer)

        def step(grads):
            sum((p * g).sum() for p, g in zip(ps, grads, strict=True)).backward()
            optimizer.step()

        calls.clear()
        step(before)
        failing[:] = [2 * len(calls)] if fails else []  # the last call of the next step
        kept = [(p.detach().clone(), mapped(optimizer.state[p], torch.clone)) for p in ps]
        if fails:
            with pytest.raises(torch.OutOfMemoryError):
                step(bad)
            optimizer.zero_grad()
            assert optimizer.state[ps[0]]["step"] == 1  # not counted down twice
            for p, (weight, state) in zip(ps, kept, strict=True):
                p.data.copy_(weight)
                optimizer.state[p].update(state)
        step(good)
        return ps

    assert all(map(torch.equal, trained(False), trained(True)))
