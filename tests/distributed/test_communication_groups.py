"""Sums travel on process groups of their own where collectives wait for each other; buckets come in
the same order on every rank, and ranks that differ are told so and do not hang."""

import functools
import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import ds_ext
from ds_ext.backward.buckets import Buckets
from ds_ext.distributed import consensus, groups
from ds_ext.distributed.placement import Sharded
from tests import worlds
from tests.common import apart, engines, models
from tests.common.choose import params
from tests.common.ranks import whole
from tests.common.states import same
from tests.common.streams import simulated
from tests.common.updates import check_each
from tests.distributed.test_faults import LOST

STAGES = (3, 2)


def trained(stage: int) -> dict[str, torch.Tensor]:
    """Weights after three steps of CAME, whose rules take rounds."""
    came = {"type": "CAME", "params": {"lr": 0.1}}
    model, zero = models.layers(12, 9, 10), {"overlap_comm": True}
    engine = engines.start(model, None, stage, optimizer=came, zero=zero)
    weights = engines.trained(engine, loss_of, 3)["after"]
    engine.destroy()
    return weights


def loss_of(engine: Any, number: int, rank: int) -> torch.Tensor:
    return engine(engines.rows(number, rank, 2, 12)).square().sum()


def twice() -> None:
    """The same bits on DeepSpeed's groups, and twice, as on GPUs, with our own, made once."""
    plain = [trained(stage) for stage in STAGES]
    counts, used, reducing = set(), set(), set()
    add_up, scatter = dist.all_reduce, Sharded._scatter

    def noted(x: torch.Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
        used.add(group)
        return add_up(x, *args, group=group, **more)

    def reduced(placement: Sharded, *tensors: list[torch.Tensor]) -> Any:
        reducing.add(placement.group)
        used.add(placement.publish_group)
        return scatter(placement, *tensors)

    with (
        mock.patch.object(groups, "WITHOUT_QUEUES", set()),
        mock.patch("torch.distributed.all_reduce", noted),
        mock.patch.object(Sharded, "_begin_sum", reduced),
    ):
        for _ in range(2):
            for stage, weights in zip(STAGES, plain, strict=True):
                assert same(trained(stage), weights)
                counts.add(len(dist.distributed_c10d._world.pg_map))
    own = {queue: group for (_, queue, _), group in groups._made.items()}
    assert reducing == {own["reductions"]} and own["steps"] in used and not used & reducing
    assert len(counts) == 1


def on_streams() -> None:
    """Simulated streams of a GPU change no bit, and nothing runs too early."""
    ahead: list[list[bool]] = []  # whether a bucket's question was left open, by stage
    flush = Buckets.flush

    def noted(buckets: Buckets, ended: bool = False) -> bool:
        result = flush(buckets, ended)
        ahead[-1].append(buckets.asked is not None)
        return result

    for stage in (3, 2, 0):
        plain = trained(stage)
        ahead.append([])
        with mock.patch.object(Buckets, "flush", noted), simulated() as gpu:
            found = trained(stage)
        assert same(plain, found) and not gpu.errors
    assert [*map(any, ahead)] == [False, True, True]  # at stage 3 ranks need not ask


def seconds(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def limits() -> None:
    """The groups that a layout makes without an engine, and that of an engine, wait as others."""
    with mock.patch.object(groups, "WITHOUT_QUEUES", set()):
        shorter = dist.new_group([0, 1], timeout=timedelta(seconds=77))
        assert seconds(groups.with_own_queue(shorter, torch.device("cpu"))) == 77
        trained(3)
        assert seconds(groups._made[None, "steps", (0, 1)]) == seconds(dist.group.WORLD) != 77


@worlds.on(2, limit=60)
def test_a_group_that_was_destroyed_is_made_anew():
    """Torch names it by the number of groups: the next of this name would wait for the last."""
    with mock.patch.object(groups, "WITHOUT_QUEUES", set()):
        for _ in range(4):
            own = groups.with_own_queue(dist.group.WORLD, torch.device("cpu"))
            dist.all_reduce(torch.ones(1), group=own)
            dist.destroy_process_group(own)
    assert sum(groups._counts.values()) >= 4


@pytest.mark.slow
def test_a_process_may_end_in_a_collective():
    """gloo's thread then frees a tensor, for which it needs Python's lock."""
    code = (
        "import torch, torch.distributed as dist; from ds_ext.distributed import groups\n"
        'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\n'
        'groups.for_hosts(dist.group.WORLD, torch.device("cpu"))\n'
        "dist.all_reduce(torch.ones(1_000_000), async_op=True)\n"
    )
    for _ in range(3):
        apart.python("-c", code, DS_EXT_COMMUNICATE_ALONE="1")


def killed(has_own_groups: bool) -> None:
    module = models.layers(12, 9, 10)
    optimizer = ds_ext.CAME(module.parameters())
    shared = set() if has_own_groups else groups.WITHOUT_QUEUES
    with mock.patch.object(groups, "WITHOUT_QUEUES", shared):
        ds_ext.fuse_into_backward(module, optimizer)
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            module(torch.randn(2, 12)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("job", params([twice, on_streams, limits], [limits]))
def test_groups_and_streams_of_their_own_change_no_bit_and_no_time_limit(job):
    worlds.run(2, job)


@pytest.mark.parametrize("has_own_groups", [True, False])
def test_a_lost_rank_is_told_without_an_engine_too(has_own_groups):
    other, victim = worlds.fresh(2, killed, has_own_groups, timeout=60)
    assert (other.code, victim.code) == (1, -9)
    assert LOST in other.output and other.seconds < 30


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


def loss_of_ways(model: nn.Module, number: int, rank: int, way: str) -> torch.Tensor:
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
            loss = loss_of_ways(engine, step, dist.get_rank(), way if step >= since else "")
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
    loss = functools.partial(loss_of_ways, way=case[0])
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
