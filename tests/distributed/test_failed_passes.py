"""Backward passes that fail on some ranks, or bring a second gradient before the step."""

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.distributed.consensus import DIFFERENT_PASSES
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.engines import rows
from tests.common.ranks import whole
from tests.common.updates import check_each

LAYERS, WIDTH, STEPS, LR = 4, 6, 3, 0.1
WELL, NO_BATCH = LAYERS, LAYERS + 1  # instead of a number of layers


class Failure(Exception):
    """What a rank's backward pass raises."""


class Model(nn.Module):
    """A stack of layers, each of which needs a bucket: the next layer's gradient sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor, fails_after: int = WELL, is_checkpointed: bool = False) -> Tensor:
        if is_checkpointed:
            return checkpoint(self, x.requires_grad_(), fails_after, use_reentrant=True)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + fails_after == LAYERS - 1 and x.requires_grad:
                x.register_hook(_fail)
            x = x.tanh()
        return x


def _fail(grad: Tensor) -> None:
    raise Failure


class Case(NamedTuple):
    """How the second of three steps goes wrong.

    A rank's backward pass fails after the gradients of so many layers, is ``WELL``, or does not
    run: the rank ends the step alone (``NO_BATCH``).
    """

    stage: int | None  # None: fuse_into_backward
    ends: tuple[int, ...]  # of each rank
    policy: str = "fused"
    clip: float = 0.0
    zero_grad: bool = True  # whether a rank that has caught an error calls it
    reads_norm: bool = False  # by torch's function, before each step
    ahead: bool = False  # as on a GPU, whose ranks read an answer when the next bucket is full
    is_checkpointed: bool = False  # the whole model, reentrantly
    bucket: int = 40  # elements
    is_beside: bool = False  # whether another model of the process is stepped in backward


class Towers(nn.Module):
    """Two towers, and experts. A loss uses those of them that its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.side = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, name: str) -> Tensor:
        if name == "side":
            return self.side(x)
        if name.startswith("expert"):
            return self.experts[int(name[-1])](x)
        if name == "segments":
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True).tanh()
            x = checkpoint(self.first, x, use_reentrant=True)
        return self.last(self.first(x).tanh())


class Passes(NamedTuple):
    """The losses of the passes before a step, of each rank.

    "zero" calls ``zero_grad()``; "caught" catches an error of ``torch.autograd.grad``.
    """

    passes: tuple[tuple[str, ...], ...]
    policy: str = "fused"
    bucket: int | None = None
    ahead: bool = False
    is_cut: bool = False  # by FSDP2


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def loss_of(model: Any, number: int, rank: int, *how: Any) -> Tensor:
    return model(rows(number, rank, 3, WIDTH), *how).square().sum()


def by_torch(kind: type[nn.Module], loss: engines.Loss, **how: Any) -> engines.Alone:
    model = make(kind)
    return engines.alone(model, torch.optim.SGD(model.parameters(), lr=LR), loss, **how)


def start(
    model: nn.Module, stage: int | None, policy: str, bucket: int | None, ahead: bool = False,
    **more: Any
) -> Any:  # fmt: skip
    """An engine; if ``ahead``, one without DeepSpeed that asks as on a GPU."""
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    if not ahead:
        zero = {"reduce_bucket_size": bucket}
        return engines.start(model, optimizer, stage, policy, zero=zero, **more)
    how: dict[str, Any] = {"bucket_size": bucket, "gradient_policy": policy}
    engine = engines.Fused(model, optimizer, 1, group=dist.new_group(), **how)
    engine.fused.layout.host_group = dist.new_group()  # where no sums of gradients wait
    engine.fused.buckets.asks_ahead = True
    return engine


def train(case: Case) -> tuple[list[tuple[int, str]], dict[str, Tensor]]:
    """The error of each step that had one, and the weights unless the last one had."""
    model, rank, errors = make(Model), dist.get_rank(), []
    if case.is_beside:
        other = make(Model)
        beside = ds_ext.fuse_into_backward(other, ds_ext.LOMO(other.parameters(), lr=LR))
        assert not beside.is_begun
    how = case.policy, case.bucket, case.ahead
    engine = start(model, case.stage, *how, gradient_clipping=case.clip)
    for step in range(STEPS):
        fails_after = case.ends[rank] if step == 1 else WELL
        try:
            if fails_after != NO_BATCH:
                engine.backward(loss_of(engine, step, rank, fails_after, case.is_checkpointed))
            if case.reads_norm:
                nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            engine.step()
        except Failure:
            errors.append((step, "Failure"))
            if case.zero_grad:
                model.zero_grad()
        except RuntimeError as error:
            return [*errors, (step, str(error))], {}
    return errors, whole(model)


def mistake(stage: int | None, policy: str, bucket: int, what: str) -> list[str]:
    """What each of three steps says; before the end of the second, one rank makes a mistake.

    "gradient": it writes to ``grad``. "rate", "late rate": it sets a wrong learning rate before or
    after backward. Stage None is ``fuse_into_backward``, and -1 the same, asking as on a GPU.
    """
    model, rank, told = make(Model), dist.get_rank(), []
    engine = start(model, stage, policy, bucket, stage == -1)
    (group,), param = engine.optimizer.param_groups, next(model.parameters())
    for step in range(STEPS):
        is_wrong = step == 1 and rank == 1
        try:
            group["lr"] = "x" if is_wrong and what == "rate" else LR
            engine.backward(loss_of(engine, step, rank))
            group["lr"] = "x" if is_wrong and what == "late rate" else group["lr"]
            param.grad = torch.zeros_like(param) if is_wrong and what == "gradient" else None
            engine.step()
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
            param.grad = None
            model.zero_grad()
    return told


def restart(stage: int) -> dict[str, Tensor]:
    """The weights after a step of two micro-batches; a forward pass sees the one before dropped."""
    model, rank = make(Model), dist.get_rank()
    engine = start(model, stage, "sharded", 50, gradient_accumulation_steps=2)
    for number in range(3):
        loss = loss_of(engine, number, rank)
        if number == 1:
            engine.zero_grad()
        engine.backward(loss)
        engine.step()
    return whole(model)


def train_towers(case: Passes) -> tuple[str, int, dict[str, Tensor]]:
    """The error of the step, or "", the number of the last pass, and the weights."""
    model, rank, number = make(Towers), dist.get_rank(), 0
    if case.is_cut:
        for layer in (model.first, model.last, model.side, *model.experts):
            fully_shard(layer)
        fully_shard(model)
    optimizer = start(model, None, case.policy, case.bucket, case.ahead).optimizer
    try:
        for number, name in enumerate(case.passes[rank]):
            if name == "zero":
                model.zero_grad()
            elif name == "caught":
                loss = loss_of(model, number, rank, "trunk")
                with pytest.raises(RuntimeError):
                    torch.autograd.grad(loss, torch.zeros(3, requires_grad=True))
            else:
                loss_of(model, number, rank, name).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error), number, {}
    return "", number, whole(model)


DIFFERENT = [
    Case(1, (1, 3)),
    Case(2, (0, 2)),
    Case(0, (1, WELL), "sharded"),
    Case(1, (2, 0), clip=1.0),
    Case(1, (WELL, 0), clip=1.0),
    Case(1, (1, 3), "sharded", zero_grad=False),
    Case(3, (1, 3)),
    Case(3, (2, 0), zero_grad=False),
    Case(3, (WELL, 1), clip=1.0),
    Case(None, (1, 3)),
    Case(None, (2, 1), zero_grad=False),
    Case(None, (1, 3), clip=1.0),
    Case(None, (1, 2), ahead=True),
    Case(None, (2, 3), ahead=True),
    Case(None, (2, WELL), "sharded", ahead=True),
    Case(1, (1, 3, 2)),
    Case(1, (1, WELL), zero_grad=False, is_checkpointed=True),
    Case(None, (1, WELL), zero_grad=False, is_checkpointed=True),
    Case(0, (WELL, 1), "sharded", zero_grad=False, is_checkpointed=True),
    # Ranks without a batch.
    Case(1, (NO_BATCH, WELL)),
    Case(2, (NO_BATCH, WELL), clip=1.0),
    Case(0, (WELL, NO_BATCH), "sharded"),
    Case(None, (NO_BATCH, WELL), clip=1.0),
    Case(1, (NO_BATCH, WELL), reads_norm=True),
]
EACH = [(case,) for case in DIFFERENT]
# At one layer, or where other ranks are asked nothing.
ALIKE = [
    Case(1, (2, 2), "sharded"),
    Case(2, (2, 2), clip=1.0),
    Case(None, (3, 3), "sharded", ahead=True),
    Case(3, (2, 2), "sharded"),
    Case(None, (2, 2), "sharded"),
    Case(None, (2, 0), bucket=10**6),
]


def name(case):
    more = ["clipped"] * bool(case.clip) + ["goes_on"] * (not case.zero_grad)
    more += ["reads_norm"] * case.reads_norm + ["ahead"] * case.ahead
    more += ["checkpointed"] * case.is_checkpointed
    return "-".join([f"stage{case.stage}", *map(str, case.ends), case.policy, *more])


@pytest.mark.parametrize("case", params(EACH, EACH[::2]), ids=name)
def test_ranks_in_different_passes_all_raise_the_same_error(case):
    for errors, _ in worlds.run(len(case.ends), train, case, limit=20):
        *failures, (_, last) = errors
        assert last == DIFFERENT_PASSES
        assert failures in ([], [(1, "Failure")])


@pytest.mark.parametrize("case", ALIKE, ids=name)
def test_a_pass_that_fails_alike_on_all_ranks_leaves_no_trace(case):
    def without_second(model, number, rank):
        return loss_of(model, 2 * number, rank)

    expected = by_torch(Model, without_second, steps=2, max_norm=case.clip)
    for errors, after in worlds.run(2, train, case):
        assert errors == [(1, "Failure")]
        check_each(after, expected.after, expected.before)


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("bucket", [40, 10**6])
def test_a_rank_without_a_batch_may_read_the_norm_without_an_engine(bucket, is_beside):
    case = Case(None, (NO_BATCH, WELL), reads_norm=True, bucket=bucket, is_beside=is_beside)
    _, without = worlds.run(2, train, case._replace(reads_norm=False), limit=20)[0]
    for errors, after in worlds.run(2, train, case, limit=20):
        assert not errors and all(torch.equal(p, without[n]) for n, p in after.items())


@worlds.on(2, limit=20)
def test_a_rank_without_a_batch_does_not_step_in_silence_by_what_others_keep():
    """The first rank has no batch in the first of two steps, whose loss reaches two models.

    A rank with a batch keeps the gradients of both; the first one must not step in silence by them.
    """
    pair, rank = [make(Model), make(Model)], dist.get_rank()
    optimizers = [ds_ext.AdaLomo(model.parameters(), lr=LR) for model in pair]
    for model, optimizer in zip(pair, optimizers, strict=True):
        ds_ext.fuse_into_backward(model, optimizer, bucket_size=10**6)
    with pytest.raises(RuntimeError, match=re.escape(DIFFERENT_PASSES)):
        for step in range(2):
            if step or rank:
                pair[1](pair[0](rows(step, rank, 3, WIDTH))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()


MISTAKES = [(3, "fused", "gradient"), (1, "sharded", "gradient"), (None, "fused", "gradient")]
MISTAKES += [(stage, "fused", "rate") for stage in (0, 3, None, -1)]
MISTAKES += [(stage, "sharded", "late rate") for stage in (2, 3, -1)]


@pytest.mark.parametrize("bucket", params([40, 10**6], [40]))
@pytest.mark.parametrize("stage, policy, what", MISTAKES)
def test_a_mistake_of_one_rank_is_named_at_once_on_all_ranks(stage, policy, what, bucket):
    told = worlds.run(2, mistake, stage, policy, bucket, what, limit=20)
    error, by = "LOMO: param_groups[0].lr", ""
    if what == "gradient":
        error = "layers.0.weight has a gradient that did not come from backward"
        by = "" if stage else "DistributedDataParallel writes"
    first, second, third = told[0]
    assert second.startswith(f"rank 1: {error}") and by in second
    assert told[1] == told[0] and not first and not third


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_grad_between_forward_and_backward_drops_what_came_before(stage):
    def without_first(model, number, rank):
        return loss_of(model, number + 1, rank)

    expected = by_torch(Model, without_first, steps=1, accumulation=2)
    for after in worlds.run(2, restart, stage):
        check_each(after, expected.after, expected.before)


AGAIN = (("trunk", "trunk"),) * 2
REFUSED = {
    "whole": Passes((("trunk", "trunk", "trunk"),) * 2),
    "small-buckets": Passes(AGAIN, bucket=40),
    "ahead": Passes(AGAIN, bucket=40, ahead=True),
    "ahead-whole": Passes(AGAIN, ahead=True),
    "another-between": Passes((("trunk", "side", "trunk"),) * 2),
    "partial-gradients": Passes((("segments", "segments"),) * 2),
    "on-one-rank": Passes((("expert0", "expert0"), ("expert1", "expert2"))),
    "in-one-process": Passes(AGAIN[:1], bucket=10**6),
    "parts-in-one-process": Passes((("segments", "segments"),), bucket=1),
    "fsdp2": Passes(AGAIN, is_cut=True),
}
ALLOWED = {
    "towers": Passes((("trunk", "side"),) * 2),
    "towers-ahead": Passes((("trunk", "side"),) * 2, bucket=40, ahead=True),
    "segments": Passes((("segments", "side"),) * 2),
    "experts": Passes((("expert0", "expert1"), ("expert1", "expert2"))),
    "pass-on-one-rank": Passes((("trunk", "side"), ("trunk",))),
    "discarded": Passes((("trunk", "zero", "trunk"),) * 2),
    "discarded-without-a-batch": Passes((("trunk", "zero", "trunk"), ("zero", "trunk"))),
    "caught": Passes((("trunk", "caught"), ("trunk",))),
    "sharded": Passes(AGAIN, "sharded"),
    "fsdp2": Passes((("trunk", "side"),) * 2, is_cut=True),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_second_gradient_is_refused_on_all_ranks(case):
    told = worlds.run(len(case.passes), train_towers, case)
    errors = [error for error, _, _ in told]
    assert len(set(errors)) == 1
    name = "experts.0.weight" if case.passes[0][0] == "expert0" else ("first", "last")
    assert errors[0].startswith(name)
    assert "got a second gradient" in errors[0] and "before optimizer.step()" in errors[0]
    if case is REFUSED["whole"]:  # a loop without steps ends at its second pass
        assert [number for _, number, _ in told] == [1, 1]


@pytest.mark.parametrize("case", ALLOWED.values(), ids=ALLOWED)
def test_passes_that_bring_each_gradient_once_are_one_step(case):
    def loss_since_zero(model, number, rank):
        """The sum of the losses since ``zero_grad()`` was called last."""
        names = case.passes[rank]
        numbers = [i for i in range(len(names)) if "zero" not in names[i:] and names[i] != "caught"]
        return sum(loss_of(model, i, rank, names[i]) for i in numbers)

    expected = by_torch(Towers, loss_since_zero, steps=1)
    for error, _, after in worlds.run(2, train_towers, case):
        assert not error
        check_each(after, expected.after, expected.before)
