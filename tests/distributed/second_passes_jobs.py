"""Several backward passes before one step, without an engine, on real ranks."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.common.engines import rows
from tests.distributed import fully_shard_jobs

WIDTH, LR = 6, 0.1


class Model(nn.Module):
    """Two towers, and experts. A loss uses those of them that its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.side = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, name: str) -> Tensor:
        if name == "side":
            return self.side(x).square().sum()
        if name.startswith("expert"):
            return self.experts[int(name[-1])](x).square().sum()
        if name == "segments":
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True).tanh()
            x = checkpoint(self.first, x, use_reentrant=True)
        return self.last(self.first(x).tanh()).square().sum()


class Case(NamedTuple):
    """The losses of the passes before a step, of each rank; "zero" calls ``zero_grad()``."""

    passes: tuple[tuple[str, ...], ...]
    policy: str = "fused"
    bucket: int | None = None
    ahead: bool = False  # as on a GPU, whose ranks read an answer when the next bucket is full
    is_cut: bool = False  # by FSDP2


def make() -> Model:
    torch.manual_seed(3)
    return Model()


def loss_of(model: Any, number: int, rank: int, name: str) -> Tensor:
    return model(rows(number, rank, 3, WIDTH), name)


def counted_loss(model: Any, rank: int, names: tuple[str, ...]) -> Tensor:
    """The sum of the losses since ``zero_grad()`` was called last."""
    numbers = [i for i in range(len(names)) if "zero" not in names[i:]]
    return sum(loss_of(model, i, rank, names[i]) for i in numbers)  # type: ignore[return-value]


def train(case: Case) -> tuple[str, dict[str, Tensor]]:
    """The error of the step, or "", and the weights."""
    model, rank = make(), dist.get_rank()
    if case.is_cut:
        for layer in (model.first, model.last, model.side, *model.experts):
            fully_shard(layer)
        fully_shard(model)
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    how: dict[str, Any] = {"group": dist.new_group()} if case.ahead else {}
    fused = ds_ext.fuse_into_backward(
        model, optimizer, bucket_size=case.bucket, gradient_policy=case.policy, **how
    )
    if case.ahead:
        fused.layout.host_group = dist.new_group()  # where no sums of gradients wait
        fused.buckets.asks_ahead = True
    try:
        for number, name in enumerate(case.passes[rank]):
            if name == "zero":
                model.zero_grad()
            else:
                loss_of(model, number, rank, name).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error), {}
    return "", fully_shard_jobs.whole(model)


def train_without_steps() -> tuple[str, int]:
    """The error of a loop that never calls ``step()``, and its number of backward passes."""
    model = make()
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=LR))
    for number in range(3):
        try:
            loss_of(model, number, dist.get_rank(), "trunk").backward()
        except RuntimeError as error:
            return str(error), number
    return "", 3
