"""Complex parameters are refused, and weights that are read again after their step are noticed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests.common.hypers import FOR_ALL


class Reading(nn.Module):
    """``weight`` is also read without a gradient, by a node that runs after its step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(torch.tanh(self.first(x)), self.weight.detach())
        return F.linear(torch.tanh(h), self.weight).square().sum()


@pytest.mark.parametrize("name", FOR_ALL)
def test_a_weight_that_was_read_detached_and_is_needed_after_its_step_is_an_error(name):
    model = Reading()
    optimizer = OPTIMIZERS[name](model.parameters())
    ds_ext.fuse_into_backward(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(3, 5)).backward()


def test_it_is_right_where_gradients_are_kept():
    torch.manual_seed(1)
    model, plain = Reading(), Reading()
    plain.load_state_dict(model.state_dict())
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    fused = ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded")
    ordinary = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(3, 5)
        fused.backward(model(x))
        optimizer.step()
        ordinary.zero_grad()
        plain(x).backward()
        ordinary.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class Rotating(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        turn = torch.polar(torch.ones(2), torch.arange(2.0))
        self.turn = nn.Parameter(turn, requires_grad=trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.linear(x).view(-1, 2, 2)) * self.turn
        return torch.view_as_real(pairs).square().sum()


@pytest.mark.parametrize("name", FOR_ALL)
def test_complex_parameters_are_refused(name):
    with pytest.raises(ValueError, match="complex64.*view_as_real"):
        OPTIMIZERS[name](Rotating(trains=True).parameters())


@pytest.mark.parametrize("name", ["LOMO", "AdaLomo", "Muon"])
def test_a_parameter_that_becomes_complex_is_refused(name):
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(ds_ext, name)([p], lr=0.1)
    p.grad = torch.ones(4, 4)
    optimizer.step()
    p.data = p.data.to(torch.complex64)
    p.grad = torch.ones(4, 4, dtype=torch.complex64)
    before = p.detach().clone()
    with pytest.raises(ValueError, match="complex64.*view_as_real"):
        optimizer.step()
    assert torch.equal(p, before)


def test_a_group_with_a_complex_parameter_is_refused_and_not_added():
    model = Rotating(trains=True)
    optimizer = ds_ext.LOMO(model.linear.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="complex64"):
        optimizer.add_param_group({"params": [model.turn]})
    assert len(optimizer.param_groups) == 1 and model.turn not in optimizer.group_of


@pytest.mark.parametrize("fuse", [True, False])
def test_a_complex_parameter_may_be_frozen_but_not_trained_later(fuse):
    model = Rotating(trains=False)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    if fuse:
        ds_ext.fuse_into_backward(model, optimizer)
    before = model.linear.weight.detach().clone()
    model(torch.randn(3, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.linear.weight, before)
    model.turn.requires_grad_(True)
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="complex64"):
        model(torch.randn(3, 4)).backward()
        optimizer.step()
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())
