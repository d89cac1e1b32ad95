"""``fuse_into_backward`` on two ranks: parameters of others, and buffers as they lie.

How replicas train is in tests/scenarios.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests import worlds
from tests.common.ranks import message


def strangers() -> dict[str, Any]:
    """What happens to a parameter outside the model, and to a gradient written by hand."""
    model, rank = nn.Linear(6, 9), dist.get_rank()
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer)
    group = {"params": [nn.Parameter(torch.ones(2))]}
    told = [message(lambda: optimizer.add_param_group(group), ValueError)]
    before = model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, float(rank))
    told.append(message(optimizer.step, RuntimeError))
    return {"told": told, "unmoved": torch.equal(before, model.weight)}


def buffers() -> dict[str, torch.Tensor]:
    """Buffers that lie in memory in odd ways, as they arrive; each rank has others."""
    model, rank = nn.Linear(2, 2), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(5, 6, generator=generator)
    beside = whole.clone()
    odd = {
        "column": whole[:, 1:3],
        "expanded": torch.randn(1, 4, generator=generator).expand(3, 4),
        "number": torch.randn((), generator=generator).expand(2, 3),
        "turned": torch.randn(3, 5, generator=generator).t(),
        "windows": torch.randn(6, generator=generator).unfold(0, 3, 1),
        "flags": torch.tensor([rank == 0, rank == 1]).expand(3, 2),
        "halves": torch.randn(4, 4, generator=generator).half()[::2, ::2],
        "none": torch.empty(0, 3),
    }
    for name, value in odd.items():
        model.register_buffer(name, value)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))
    kept = torch.equal(whole[:, 3:], beside[:, 3:]) and torch.equal(whole[:, :1], beside[:, :1])
    return {n: b.clone() for n, b in model.named_buffers()} | {"kept": torch.tensor(kept)}


WORLD = 2


def test_what_no_hook_would_step_is_refused_on_all_ranks():
    for got in worlds.run(WORLD, strangers):
        assert got["unmoved"] and len(got["told"]) == 2
        assert "not part of the model" in got["told"][0]
        assert "weight has a gradient that did not come from backward" in got["told"][1]
        assert "DistributedDataParallel writes .grad too" in got["told"][1]


def test_buffers_arrive_however_they_lie_in_memory():
    first, second = worlds.run(WORLD, buffers)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert first["kept"]
    assert first["flags"].tolist() == [[True, False]] * 3


def drop_part(before_norm: bool) -> str:
    """The error of dropping the gradients of a layer before or after the norm was read."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded", max_grad_norm=1.0)
    model(torch.eye(4)).square().sum().backward()
    if before_norm:
        model[0].zero_grad()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    told = "" if before_norm else message(model[0].zero_grad)
    optimizer.step()
    return told


@pytest.mark.parametrize("before_norm, error", [(True, ""), (False, "zero_grad() of some parame")])
def test_part_of_the_gradients_is_dropped_only_before_the_norm_is_read(before_norm, error):
    for told in worlds.run(2, drop_part, before_norm):
        assert told.startswith(error) and bool(told) == bool(error)
