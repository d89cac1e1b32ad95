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
from tests.common.choose import params
from tests.common.engines import rows
from tests.common.plain import mean_step
from tests.common.ranks import REFUSALS, message, whole
from tests.common.updates import check_each

CLIP = 0.05


class Normed(nn.Module):
    """Batch norms, one of them in a checkpointed segment."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9))
        self.second = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9, affine=False), nn.Tanh())
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Linear(9, 4)

    def segment(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1  # a new tensor each time
        return self.second(h)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.segment, self.first(x), use_reentrant=self.reentrant)
        return self.last(h).square().sum()


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
@pytest.mark.parametrize("reentrant", params([True, False], [True]))
def test_measuring_leaves_the_buffers_of_checkpointed_segments_alone(stage, reentrant):
    once, twice = (
        worlds.run(2, normed, stage, reentrant, policy) for policy in ("sharded", "fused")
    )
    for expected, got in zip(once, twice, strict=True):
        assert got["second.1.num_batches_tracked"] == 6
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", params([0, 1, 2, 3, "fsdp2"], [0, 3, "fsdp2"]))
@worlds.on(2)
def test_other_models_of_a_loss_are_refused_where_they_cannot_be_clipped_with_it(stage):
    """A head whose gradients, of one rank only, are clipped with the model's, and an engine of
    DeepSpeed's own through which the loss goes."""
    model, head = nn.Linear(6, 8), nn.Linear(8, 3)
    if stage == "fsdp2":
        fully_shard(model)
    engine = start(model, None if stage == "fsdp2" else stage)
    engine.backward(head(engine(rows(0, 0, 4, 6))).square().sum())
    if dist.get_rank():
        head.zero_grad()
    with pytest.raises(REFUSALS, match="Clip the others by a call of their own"):
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], CLIP)
    engine.step()
    if stage != "fsdp2":
        theirs = engines.start(head, torch.optim.SGD(head.parameters(), lr=0.5), stage)
        loss = theirs(engine(rows(1, 0, 4, 6))).square().sum()
        with pytest.raises(REFUSALS, match="(?s)DeepSpeed's own.*sharded|sharded.*DeepSpeed's own"):
            engine.backward(loss)
