"""``fuse_into_backward`` on two ranks: parameters of others, and buffers as they lie.

How replicas train is in tests/scenarios.
"""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ext
from tests import worlds
from tests.common.ranks import REFUSALS, logged


@worlds.on(2)
def test_gradients_of_a_layer_may_be_dropped_before_the_norm_was_read_and_not_after_it():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy="sharded", max_grad_norm=1.0)
    for drops in ("before the norm", "after it"):
        model(torch.eye(4)).square().sum().backward()
        if drops == "before the norm":
            model[0].zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if drops == "after it":
            with pytest.raises(REFUSALS, match=r"^zero_grad\(\) of some parame"):
                model[0].zero_grad()
        optimizer.step()


def refused(is_refused: bool, kind: type[Exception], words: str) -> AbstractContextManager:
    return pytest.raises(kind, match=words) if is_refused else nullcontext()


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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "all ranks"])
@worlds.on(2)
def test_a_state_that_only_some_ranks_have_loaded_is_found(ranks, when):
    model = nn.Linear(6, 9)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=0.1)
    model(torch.eye(6)).square().sum().backward()
    optimizer.step()
    saved, optimizer = optimizer.state_dict(), ds_ext.AdaLomo(model.parameters(), lr=0.1)
    model.zero_grad()
    if when == "before" and dist.get_rank() in ranks:
        optimizer.load_state_dict(saved)
    is_refused = len(ranks) < 2
    with refused(is_refused and when == "before", ValueError, "optimizer states.* steps: 1 and 0"):
        ds_ext.fuse_into_backward(model, optimizer)
        if when == "after" and dist.get_rank() in ranks:
            optimizer.load_state_dict(saved)
        with refused(is_refused, RuntimeError, "only some ranks have called load_state_dict"):
            model(torch.eye(6)).square().sum().backward()
            optimizer.step()


def test_buffers_arrive_however_they_lie_in_memory():
    first, second = worlds.run(2, buffers)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert first["kept"]
    assert first["flags"].tolist() == [[True, False]] * 3


@worlds.on(2)
def test_a_step_without_a_pass_on_one_rank_is_told_there_once():
    model = nn.Linear(6, 9)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer)
    with logged() as said:
        for step in range(3):
            if step == 0 or dist.get_rank() == 0:  # rank 1's batches have run out
                model(torch.eye(6)).square().sum().backward()
            optimizer.step()
    found = [line for line in said if "on this rank without a backward pass" in line]
    assert len(found) == dist.get_rank()


class Residual(nn.Module):
    """Backward reads the gradient of ``position`` again at its end, for ``early``."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(5, 6), nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6))
        self.position = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        early = self.early(x)
        return torch.tanh((self.late(x) + self.position.view(4, 6)) + early).square().mean()


@worlds.on(2)
def test_a_gradient_that_backward_still_reads_is_not_summed_in_place():
    torch.manual_seed(0)
    model, whole = Residual(), Residual()
    whole.load_state_dict(model.state_dict())
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=1)
    batches = torch.randn(2, 4, 5)
    model(batches[dist.get_rank()]).backward()
    optimizer.step()
    torch.stack([whole(x) for x in batches]).mean().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p, q - 0.5 * q.grad, atol=1e-6)
