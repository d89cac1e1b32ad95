"""Gradients that kernels judge on their device: the host reads what they found once, at the end.

That the first round of a step tells which gradients are bad is in test_nonfinite.py.
"""

import math
from unittest import mock

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.backward import startup_log
from ds_ext.ops.executors.native import native_table as native_table
from ds_ext.ops.executors.triton import devices, launch_memory, launches
from ds_ext.ops.state import mapped
from ds_ext.optimizer import update_stats
from ds_ext.optimizer.nonfinite import GradFlags
from tests.common import needs, paths, table
from tests.common.hypers import BATCHED, SIMULATED

pytestmark = needs.triton


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
