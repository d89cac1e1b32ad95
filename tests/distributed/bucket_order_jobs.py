"""Ranks that go through the model in different ways: what each stage makes of it."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests.common import engines
from tests.common.ranks import whole

STEPS, FROM = 4, 2  # steps, and the first in which rank 1 goes its own way where it does so late


class Ways(nn.Module):
    """Two layers alike in size, which rank 1 may swap, and two that it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        first, second = (self.b, self.a) if way == "swapped" else (self.a, self.b)
        h = second(torch.tanh(first(x)))
        if way != "less":
            h = h + self.down(torch.tanh(self.up(h)))
        return h.square().mean()


def make() -> Ways:
    torch.manual_seed(0)
    return Ways()


def loss_of(model: nn.Module, number: int, rank: int, way: str) -> torch.Tensor:
    return model(engines.rows(number, rank, 5, 7), way if rank == 1 else "")


def train(
    stage: int | None, way: str, since: int, persist: int, ahead: bool = False
) -> dict[str, Any]:
    """Trains until it ends, or is refused: the error, how long it took, the weights."""
    model = make()
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=0.01)
    zero = {"stage3_param_persistence_threshold": persist}
    engine = engines.start(model, optimizer, stage, zero=zero)
    if stage == 3:
        engine.optimizer.layout.order.ahead = ahead
    error, began, step = "", time.monotonic(), 0
    try:
        for step in range(STEPS):
            began = time.monotonic()
            if way == "frozen" and dist.get_rank() == 1 and step == since:
                model.down.requires_grad_(False)
            if way == "either" and step == since:
                (model.b if dist.get_rank() else model.a).requires_grad_(False)
            loss = loss_of(engine, step, dist.get_rank(), way if step >= since else "")
            engine.backward(loss)
            engine.step()
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - began
    after = {} if error else whole(model)
    return {"error": error, "step": step, "seconds": seconds, "after": after}


CASES = {
    **{(way, s, 0): (s, way, 0, 0) for way in ("swapped", "less") for s in (None, 0, 1, 2)},
    ("swapped", 3, 0): (3, "swapped", 0, 0),
    ("less", 3, 0): (3, "less", 0, 0),
    # What DeepSpeed keeps gathered is left out without its noticing.
    ("less", 3, FROM): (3, "less", FROM, 10**6),
    ("frozen", 3, FROM): (3, "frozen", FROM, 0),
    ("swapped", 3, FROM): (3, "swapped", FROM, 0),
    # On a GPU a bucket may be on its way before it is known that it differs.
    ("either", 3, FROM): (3, "either", FROM, 10**6, True),
    ("", 3, 0): (3, "", 0, 0, True),
}
# Here DeepSpeed waits for weights that other ranks do not gather.
WAITING, TIMEOUT = ("swapped", 3, FROM), 5
