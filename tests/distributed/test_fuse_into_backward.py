"""``fuse_into_backward`` on two ranks: parameters that come later, and buffers as they lie."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.ranks import message
from tests.common.states import same
from tests.common.updates import check_each

STEPS = 4


class Tower(nn.Module):
    """Its layers are also called other than through ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale

    def loss(self, step: int, rank: int) -> torch.Tensor:
        return Tower.forward(self, engines.rows(step, rank, 3, 6)).square().mean()


def make() -> Tower:
    torch.manual_seed(3)
    model = Tower()
    model.first.requires_grad_(False)
    model.scale.requires_grad_(False)
    return model


def groups(model: Tower) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What is trained from the beginning, though ``first`` is frozen then; and what comes later."""
    return [*model.first.parameters(), *model.second.parameters()], [model.scale]


def change(model: Tower, optimizer: torch.optim.Optimizer, step: int) -> None:
    """What the script does between steps."""
    if step == 1:
        model.first.requires_grad_(True)
    if step == 2:
        model.scale.requires_grad_(True)
        optimizer.add_param_group({"params": groups(model)[1], "lr": 0.05})


def train(how: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Trains with gradients left in ``grad`` from before, and never calls ``model(...)``."""
    model, rank = make(), dist.get_rank()
    model.loss(99, rank).backward()
    optimizer = ds_ext.LOMO(groups(model)[0], lr=0.1)
    fused = ds_ext.fuse_into_backward(model, optimizer, **how)
    for step in range(STEPS):
        change(model, optimizer, step)
        fused.backward(model.loss(step, rank))
        optimizer.step()
    return dict(model.state_dict())


def alone(world: int, max_norm: float) -> engines.Alone:
    model = make()
    sgd = torch.optim.SGD(groups(model)[0], 0.1)
    return engines.alone(model, sgd, Tower.loss, STEPS, world, max_norm, edit=change)


def strangers() -> dict[str, Any]:
    """What happens to a parameter outside the model, and to a gradient written by hand."""
    model, rank = make(), dist.get_rank()
    optimizer = ds_ext.LOMO(groups(model)[0], lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer)
    group = {"params": [nn.Parameter(torch.ones(2))]}
    told = [message(lambda: optimizer.add_param_group(group), ValueError)]
    before = model.second.weight.detach().clone()
    model.second.weight.grad = torch.full_like(model.second.weight, float(rank))
    told.append(message(optimizer.step, RuntimeError))
    return {"told": told, "unmoved": torch.equal(before, model.second.weight)}


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
HOW = {"fused": {}, "small buckets": {"bucket_size": 10}, "sharded": {"gradient_policy": "sharded"}}
HOW |= {"clipped": {"max_grad_norm": 0.3}}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_unfrozen_and_added_parameters_are_stepped_by_the_gradients_of_all_ranks(how):
    before, expected, _ = alone(WORLD, how.get("max_grad_norm", 0.0))
    first, second = worlds.run(WORLD, train, how)
    assert same(first, second)
    check_each(first, expected, before)
    assert not any(torch.equal(p, before[n]) for n, p in expected.items())


def test_what_no_hook_would_step_is_refused_on_all_ranks():
    for got in worlds.run(WORLD, strangers):
        assert got["unmoved"] and len(got["told"]) == 2
        assert "not part of the model" in got["told"][0]
        assert "second.weight has a gradient that did not come from backward" in got["told"][1]
        assert "DistributedDataParallel writes .grad too" in got["told"][1]


def test_buffers_arrive_however_they_lie_in_memory():
    first, second = worlds.run(WORLD, buffers)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert first["kept"]
    assert first["flags"].tolist() == [[True, False]] * 3
