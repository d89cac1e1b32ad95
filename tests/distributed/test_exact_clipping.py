"""Exact clipping by engines, of graphs that are hard to run backward twice."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests import worlds
from tests.common import engines, fused_losses
from tests.common.engines import rows
from tests.common.plain import mean_step
from tests.common.ranks import message, whole
from tests.common.updates import check_each
from tests.distributed.fully_shard_jobs import whole as whole_dtensors
from tests.unit.test_exact_clipping import Normed

CLIP = 0.05


def start(model: nn.Module, stage: int, policy: str = "") -> Any:
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    return engines.start(model, optimizer, stage, policy, gradient_clipping=CLIP)


def in_place(stage: int) -> dict[str, Any]:
    """A loss that one rank's backward writes to in place: what all ranks are told, and after."""
    rank = dist.get_rank()
    model = fused_losses.make("saved")
    before = whole(model)
    engine = start(model, stage)
    model.factor = 2.0 if rank == 1 else 1.0
    told = message(lambda: engine.backward(engine(*fused_losses.batch(rank))), RuntimeError)
    kept = all(torch.equal(before[n], x) for n, x in whole(model).items())
    model.factor = 1.0
    engine.backward(engine(*fused_losses.batch(10 + rank)))
    engine.step()
    return {"message": told, "kept": kept, "before": before, "after": whole(model)}


def normed(stage: int, reentrant: bool, policy: str) -> dict[str, Tensor]:
    """Weights and buffers after training with a checkpointed batch norm."""
    torch.manual_seed(5)
    model = Normed(reentrant)
    engine = start(model, stage, policy)
    found = engines.trained(engine, lambda model, *of: model(engines.rows(*of, 8, 6)), 3)
    return found["after"] | {n: x.clone() for n, x in model.named_buffers()}


LR = 0.5
STEPS = 3


class Body(nn.Module):
    """Its second layer is in a reentrant segment, if ``reentrant``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return checkpoint(self.second, h, use_reentrant=True) if self.reentrant else self.second(h)


def make(reentrant: bool) -> tuple[Body, nn.Module, nn.Module]:
    """A body, a second model, and a head that torch trains."""
    torch.manual_seed(1)
    return Body(reentrant), nn.Linear(6, 8), nn.Linear(8, 3)


def others_of(body: Any, second: Any, head: nn.Module, backward: Any, step: int, rank: int) -> Any:
    """A backward pass -> gradients of the input, of a hidden tensor and of the head."""
    x = rows(step, rank, 4, 6).requires_grad_()
    hidden = body(x) * torch.tanh(second(x))
    hidden.retain_grad()
    backward(head(hidden).square().sum())
    return [g.clone() for g in (x.grad, hidden.grad, head.weight.grad, head.bias.grad)]


def reference(world: int, reentrant: bool) -> list[Any]:
    """Of each step: the other gradients of each rank, and the weights of both models after it."""
    *models, head = make(reentrant)
    told = []
    for step in range(STEPS):
        others = []
        for rank in range(world):
            others.append(others_of(*models, head, Tensor.backward, step, rank))
            head.zero_grad()
        for model in models:
            for p in model.parameters():
                p.grad /= world
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            torch.optim.SGD(model.parameters(), lr=LR).step()
            model.zero_grad()
        told.append((others, [p.detach().clone() for m in models for p in m.parameters()]))
    return told


def train(stage: int | str, reentrant: bool, kind: Any = ds_ext.LOMO) -> list[Any]:
    """The same by two engines, the second with an optimizer of ``kind``; or by FSDP2."""
    *models, head = make(reentrant)
    made = []
    for model, own in zip(models, (ds_ext.LOMO, kind), strict=True):
        if stage == "fsdp2":
            for layer in [*model.children(), model]:
                fully_shard(layer)
        optimizer = own(model.parameters(), lr=LR)
        at = None if stage == "fsdp2" else stage
        made.append(engines.start(model, optimizer, at, gradient_clipping=CLIP))
    told = []
    for step in range(STEPS):
        by = made[step % 2 if stage == "fsdp2" else 0]
        others = others_of(*made, head, by.backward, step, dist.get_rank())
        refuse_to_clip_both(models[0], head)
        for engine in made:
            engine.step()
        weights = whole_dtensors if stage == "fsdp2" else whole
        told.append((others, [p for m in models for p in weights(m).values()]))
    return told


def refuse_to_clip_both(body: nn.Module, head: nn.Module) -> None:
    """Clips both together, where only the first rank has gradients of the head."""
    if dist.get_rank():
        head.zero_grad()
    both = [*body.parameters(), *head.parameters()]
    said = message(lambda: torch.nn.utils.clip_grad_norm_(both, CLIP))
    assert "Clip the others by a call of their own" in said, said
    head.zero_grad()


def beside_deepspeeds(stage: int) -> str:
    """What is said where the second engine is DeepSpeed's own."""
    return message(lambda: train(stage, False, torch.optim.SGD))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_that_one_rank_writes_to_in_place_is_refused_on_all(stage):
    plain = fused_losses.make(None)
    losses = [plain(*fused_losses.batch(10 + rank)) for rank in range(2)]
    mean_step(torch.optim.SGD(plain.parameters(), lr=0.5), losses, CLIP)  # which LOMO's is
    told = worlds.run(2, in_place, stage)
    for rank, got in enumerate(told):
        assert '"gradient_policy": "sharded"' in got["message"] and got["kept"]
        assert ("InPlaceCrossEntropy" if rank else "on another rank") in got["message"]
        check_each(got["after"], plain.state_dict(), got["before"])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_measuring_leaves_the_buffers_of_checkpointed_segments_alone(stage, reentrant):
    once, twice = (
        worlds.run(2, normed, stage, reentrant, policy) for policy in ("sharded", "fused")
    )
    for expected, got in zip(once, twice, strict=True):
        assert got["second.1.num_batches_tracked"] == 6
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=name)


CASES = [(0, False), (1, True), (2, False), (3, True), ("fsdp2", False), ("fsdp2", True)]


@pytest.mark.parametrize("stage, reentrant", CASES)
def test_gradients_of_others_are_those_of_one_pass(stage, reentrant):
    wanted = reference(2, reentrant)
    for rank, told in enumerate(worlds.run(2, train, stage, reentrant)):
        before = [p for m in make(reentrant)[:2] for p in m.parameters()]
        for (others, weights), (all_others, after) in zip(told, wanted, strict=True):
            for got, expected in zip(others, all_others[rank], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            for got, expected, start in zip(weights, after, before, strict=True):
                assert (got - expected).norm() <= 1e-4 * (expected - start).norm()
            before = after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_of_deepspeeds_own_in_the_loss_is_refused(stage):
    for said in worlds.run(2, beside_deepspeeds, stage):
        assert "DeepSpeed's own" in said and "sharded" in said
