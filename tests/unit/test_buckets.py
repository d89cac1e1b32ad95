"""Which gradients are reduced together."""

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.backward import buckets, reduction


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 64, bias=False)
        self.back = nn.Linear(64, 8, bias=False)

    def forward(self, x):
        return self.back(torch.tanh(self.linear(self.norm(x))))


@pytest.fixture
def sent(monkeypatch):
    """Sizes of the parameters of each bucket that is reduced."""
    found = []
    begin = reduction.Reduction.begin

    def noted(self, grads, voters):
        found.append([p.numel() for p in grads])
        return begin(self, grads, voters)

    monkeypatch.setattr(reduction.Reduction, "begin", noted)
    return found


@pytest.mark.parametrize(
    "size, expected",
    [
        # From the last layer to the first: back, linear, and two vectors of the norm.
        (512, [[512], [512], [8, 8, 512], [512], [8, 8]]),  # few elements take one more
        (257, [[512], [512], [8, 8, 512], [512], [8, 8]]),  # of any size
        (256, [[512], [512], [8, 8], [512], [512], [8, 8]]),  # 16 are a sixteenth, and not few
        (1024, [[512, 512], [8, 8, 512], [512, 8, 8]]),
        (1056, [[512, 512, 8, 8], [512, 512, 8, 8]]),
        (1, [[512], [512], [8], [8], [512], [512], [8], [8]]),
        (None, [[512], [512], [8, 8, 512], [512], [8, 8]]),  # as many as the largest has
    ],
)
def test_small_parameters_join_a_bucket_and_large_ones_fill_it(sent, size, expected):
    model = nn.Sequential(Layer(), Layer())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=size)
    model(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    assert sent == expected
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p, old)


@pytest.mark.parametrize(
    "min_fill, expected",
    [
        (1 / 16, [[512, 512], [512, 512], [8, 8, 8, 8]]),
        (16 / 1056, [[512, 512, 8, 8], [512, 512, 8, 8]]),  # they do not wait if they fill as much
    ],
)
def test_tiny_parameters_wait_for_the_end_of_backward(sent, monkeypatch, min_fill, expected):
    monkeypatch.setattr(buckets, "SMALL", 8 / 1056)
    monkeypatch.setattr(buckets, "MIN_FILL", min_fill)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(3, 8)
    model(x).square().sum().backward()
    stepped = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    model.zero_grad()
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=1056)
    model(x).square().sum().backward()
    optimizer.step()
    assert sent == expected
    for p, expected_p in zip(model.parameters(), stepped, strict=True):
        torch.testing.assert_close(p.detach(), expected_p)
