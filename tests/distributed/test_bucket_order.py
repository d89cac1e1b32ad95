"""Buckets come in the same order on every rank; ranks that differ are told so and do not hang."""

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import ds_ext
from ds_ext.distributed import consensus
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import whole
from tests.common.updates import check_each

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


EXACT = [(case,) for case in CASES if case[1] != 3 or not case[0]]
TOLD = [(case,) for case in CASES if (case,) not in EXACT and case != WAITING]


@pytest.mark.supports(
    lambda case: "parameters used by only some ranks" if case[0] else [],
    stage=lambda case: case[1],
    optimizer="AdaLomo",
)
@pytest.mark.parametrize("case", params(EXACT, EXACT[::2]), ids=str)
def test_any_order_is_exact_below_stage_3_and_one_order_at_it(case):
    model = make()
    optimizer = transformers.Adafactor(model.parameters(), lr=0.01, relative_step=False)
    loss = functools.partial(loss_of, way=case[0])
    alone = engines.alone(model, optimizer, loss, STEPS)
    for got in worlds.once(2, train, *CASES[case]):
        assert got["error"] == ""
        check_each(got["after"], alone.after, alone.before, STEPS)


NEXT = {
    ("swapped", 0): "the forward pass of a on rank 0, and the forward pass of b on rank 1",
    ("less", 0): "the forward pass of up on rank 0, and the backward pass of the model on rank 1",
    ("either", FROM): "the gradient of b.weight on rank 0, and the gradient of a.weight on rank 1",
    ("less", FROM): "the gradient of down.weight on rank 0, and the gradient of b.weight on rank 1",
    ("frozen", FROM): (
        "the gradient of down.weight on rank 0, and the gradient of up.weight on rank 1"
    ),
}


@pytest.mark.parametrize("case", params(TOLD, TOLD[::4]), ids=str)
def test_ranks_that_differ_at_stage_3_are_all_told_so_at_once(case):
    way, _, since = case
    for rank in worlds.fresh(2, train, *CASES[case], timeout=60):
        assert rank.code == 0, rank.output
        got = rank.result
        assert f"next is {NEXT[way, since]}" in got["error"], got["error"]
        assert "zero_optimization.stage 3" in got["error"]
        assert got["step"] == since and got["seconds"] < 10


@pytest.mark.slow
def test_ranks_that_wait_for_other_weights_end_at_the_time_limit():
    for rank in worlds.fresh(2, train, *CASES[WAITING], timeout=TIMEOUT):
        assert rank.result, rank.output
        assert rank.result["error"].startswith("LostRankError"), rank.result["error"]
        assert rank.result["step"] == FROM and rank.result["seconds"] < TIMEOUT + 10


@worlds.on(2)
def test_ranks_do_not_raise_an_earlier_engines_error():
    if dist.get_rank() == 1:
        consensus.tell_error(1, ValueError("no batch"))
    dist.barrier()
    for step, expected in enumerate(("rank 1: no batch", consensus.DIFFERENT_PASSES)):
        assert str(consensus.RanksDifferError(1)) == expected
        consensus.require_equal({"step": step})
