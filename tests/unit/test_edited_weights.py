"""An edit of a 16-bit weight with a master holds to half the spacing of its dtype.

Nothing detects edits between steps. A residual that an edit leaves behind moves the weight's value
by less than half the spacing above it, and no step may turn that into another weight.
"""

import pytest
import torch
from torch import nn

from ds_ext.optimizer import OPTIMIZERS
from tests.common import paths, table
from tests.common.choose import params
from tests.common.plain import steps
from tests.common.updates import error
from tests.unit.test_precision import number as held

SHAPES = ((600,), (13, 290), (3, 40, 30))
by_path = pytest.mark.parametrize("path", paths.EACH)
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16)  # the bits of all 16-bit weights
CODES = {  # the ends, those about zero, and some between
    torch.int8: torch.cat([torch.arange(-128, 128, 11), torch.tensor([-1, 0, 1, 127])]),
    torch.int16: torch.cat([torch.arange(-(2**15), 2**15, 4093), torch.tensor([-1, 0, 2**15 - 1])]),
}
FEW = {torch.int8: torch.tensor([-128, 127]), torch.int16: torch.tensor([-32768, 32767])}


def half_spacing(w):
    """Half the distance from each weight to the next one away from zero."""
    size = w.abs()
    following = (size.view(torch.int16) + 1).view(w.dtype)
    return (following.double() - size.double()) / 2


@pytest.mark.parametrize(
    "half, mode, residual",
    [
        (torch.bfloat16, "master", torch.int16),
        (torch.bfloat16, "master24", torch.int8),
        (torch.float16, "master24", torch.int8),
    ],
    ids=["bf16 master", "bf16 master24", "fp16 master24"],
)
@by_path
def test_any_residual_stays_within_half_a_spacing_of_any_weight(
    path, half, mode, residual, monkeypatch
):
    paths.use(monkeypatch, path)
    w, codes = EVERY.view(half), CODES[residual]
    if path == "kernels":  # Triton's interpreter sets subnormal bf16 numbers to zero
        w, codes = w[(w == 0) | (w.abs() >= torch.finfo(half).smallest_normal)], FEW[residual]
        w = w.to(paths.DEVICE)
    p = nn.Parameter(w.clone())
    optimizer = OPTIMIZERS["lomo"]([p], lr=0.0, weight_update=mode)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    for code in codes:
        p.data.copy_(w)
        optimizer.state[p]["master"].fill_(code)
        value = held(optimizer, p)
        assert value.isnan().equal(w.isnan().cpu())
        finite = w.isfinite().cpu()
        off = (value.double() - w.cpu().double()).abs()[finite]
        # The largest finite weight has no next one; inf is at twice its half spacing.
        limit = half_spacing(w.cpu())[finite].clamp(max=2.0**119)
        assert (off <= limit).all()
        optimizer.step()  # by nothing
        assert p.isnan().equal(w.isnan()) and p[~w.isnan()].equal(w[~w.isnan()])
        same = held(optimizer, p)
        assert same[~same.isnan()].equal(value[~value.isnan()])


def mask(p):
    p[1::3] = 0


def clamp(p):
    p.clamp_(-0.5, 0.5)


def swap(p):
    """As an average that is swapped in for an evaluation."""
    kept = p.clone()
    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(7), device="cpu"))
    p.copy_(kept)


def trained(weights, edit, **hypers):
    """The values of bf16 weights after 100 steps with an edit after each, and the updates."""
    params = [nn.Parameter(p.clone()) for p in weights]
    optimizer = OPTIMIZERS["adalomo"](params, lr=1e-4, **hypers)
    for gradients in table.gradients(100, SHAPES, torch.bfloat16):
        steps(optimizer, params, [gradients])
        for p in params:
            edit(p.data)
    return {i: held(optimizer, p) for i, p in enumerate(params)}


@pytest.mark.parametrize("mode, close", [("master", 2e-3), ("master24", 2e-2)])
@pytest.mark.parametrize("edit", [mask, clamp])
@pytest.mark.parametrize("path", params(["ops", "native"], ["native"]))
def test_100_edited_steps_are_those_of_fp32(path, edit, mode, close, monkeypatch):
    """With the format's error. Dropped residuals would lose most of the update."""
    paths.use(monkeypatch, path)
    weights = table.weights(SHAPES, torch.bfloat16)
    expected = trained([p.float() for p in weights], edit)
    found = trained(weights, edit, weight_update=mode)
    assert error(found, expected, dict(enumerate(map(torch.Tensor.float, weights)))) <= close


@by_path
def test_fp16_weights_leave_zero_by_small_steps(path, monkeypatch):
    """A step of 1e-8 is less than half the smallest fp16 number."""
    paths.use(monkeypatch, path)
    p = nn.Parameter(torch.zeros(300, dtype=torch.float16))
    optimizer = OPTIMIZERS["lomo"]([p], lr=1e-8, weight_update="master24")
    steps(optimizer, [p], [[-torch.ones_like(p)]] * 10)
    assert torch.allclose(held(optimizer, p).cpu(), torch.tensor(1e-7, device="cpu"), rtol=0.02)


@pytest.mark.parametrize("mode", ["master", "master24"])
def test_a_weight_whose_master_is_popped_is_exactly_what_it_was_set_to(mode):
    (p,) = map(nn.Parameter, table.weights([(999,)], torch.bfloat16))
    optimizer = OPTIMIZERS["lomo"]([p], lr=0.01, weight_update=mode)
    for gradients in table.gradients(2, [(999,)], torch.bfloat16):
        steps(optimizer, [p], [gradients])
        swap(p.data)
        assert not held(optimizer, p).equal(p.float())
        optimizer.state[p].pop("master")
        assert held(optimizer, p).equal(p.float())
