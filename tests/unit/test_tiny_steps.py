"""Steps that are nearly weight decay alone, where lomo_optim and AdaLomo are 2e-2 apart."""

import pytest
import torch
from torch import nn

import ds_ext
from tests.common import plain
from tests.common.reference import _fused, lomo_optim

HYPERS = {"lr": 1e-3, "weight_decay": 0.1}


def by_ours(p, grads):
    steps = [[g] for g in grads]
    (after,), _ = plain.stepped(lambda params: ds_ext.AdaLomo(params, **HYPERS), [p], steps)
    return after.double()


def by_authors(p, grads):
    p = nn.Parameter(p.clone())
    step = _fused(lomo_optim.AdaLomo, [p], HYPERS, loss_scale=None)
    for g in grads:
        step({p: g.to(p.dtype)})
    return p.detach().double()


def gradients(shape):
    tiny = torch.randn(shape) * 1e-8
    spike = tiny.clone()
    spike.view(-1)[5] = 1e5
    return {"zeros": torch.zeros(shape), "tiny": tiny, "spike": spike}


@pytest.mark.parametrize("shape", [(64, 48), (48,)])
@pytest.mark.parametrize("kind", ["zeros", "tiny", "spike"])
def test_one_step_is_as_near_to_fp64_as_weights_of_fp32_can_be(kind, shape):
    torch.manual_seed(0)
    p, g = torch.randn(shape) * 0.02, gradients(shape)[kind]
    exact = by_authors(p.double(), [g])
    update = (exact - p.double()).norm()
    assert (by_ours(p.double(), [g]) - exact).norm() <= 1e-9 * update
    least = (exact.float().double() - exact).norm()
    error, theirs = ((by(p, [g]) - exact).norm() for by in (by_ours, by_authors))
    assert error <= 1.01 * least and error <= theirs
    if kind == "zeros":
        assert theirs > 1.2 * error > 5e-3 * update
