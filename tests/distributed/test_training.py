"""Clipping and accumulation on real ranks, by policy and stage, against one process; exact clipping
of graphs that are hard to run backward twice."""

import re
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
from tests.common.by_role import MATRICES
from tests.common.choose import pairs, params
from tests.common.engines import rows
from tests.common.hypers import CLOSE
from tests.common.plain import mean_step
from tests.common.ranks import REFUSALS, message, whole
from tests.common.states import same
from tests.common.updates import check, check_each
from tests.distributed import training_jobs
from tests.distributed.training_jobs import RUNS, STEPS
from tests.tools.support import of

ON_THREE = re.compile(
    r"^(clip-stage[03]-(fused|sharded)-(none|reentrant)|accumulation2-stage[23]-clip)"
    r"|^(value|previous|unmanaged|no_sync|galore)|^muon-(fused|accumulation2-clip)-"
)
ROUTED_ON_THREE = re.compile(r"-(60|reentrant|clip|muon)$")


def on_ranks(runs, others):
    """The runs on two ranks, and ``others`` of them on one and three."""
    return [
        (n, name)
        for n in (1, 2, 3)
        for name, run in runs.items()
        if (n == 2 or others.search(name)) and (n > 1 or run.rule not in MATRICES)
    ]


# What `make test` runs: each way to clip and to accumulate, each stage and kind of checkpointing.
QUICK = {
    *((2, f"clip-{at}") for at in ("stage0-fused-reentrant", "stage2-sharded-nonreentrant")),
    *((2, f"clip-stage3-{at}") for at in ("fused-deepspeed", "sharded-reentrant")),
    *((2, name) for name in ("value-stage3-sharded", "previous-stage3", "clip-plain-fused-none")),
    *((2, f"accumulation{n}-clip") for n in ("3-stage2", "2-plain")),
    *((2, name) for name in ("boundary-1", "muon-accumulation2-clip-1")),
}
QUICK_ROUTED = {(2, name) for name in ("plain-60", "stage1-reentrant", "stage3-clip-sharded")}


def shown(name: str) -> str | list[str]:
    """The feature that a run shows; runs of one micro-batch and no clipping show none."""
    how = RUNS[name]
    if how.checkpointing == "deepspeed":
        return "`deepspeed.checkpointing`"
    if how.accumulation > 1:
        return "gradient accumulation" + (" with clipping" if how.max_norm else "")
    if how.clip_value:
        return "clipping by value"
    if how.clip_mode == "previous":
        return "clipping by the previous step's norm"
    policy = "sharded" if how.policy == "sharded" else "fused"
    return f'clipping by norm, `"{policy}"`' if how.max_norm else []


ALL = pairs(
    on_ranks(RUNS, ON_THREE),
    lambda case: (case[0], *RUNS[case[1]].settings, str(shown(case[1]))),
    QUICK,
)
ROUTED = pairs(
    on_ranks(training_jobs.ROUTED, ROUTED_ON_THREE),
    lambda case: (case[0], *training_jobs.ROUTED[case[1]].settings),
    QUICK_ROUTED,
)


@pytest.mark.supports(shown, **of(RUNS))
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_equals_one_process_with_the_global_batch(ranks, name):
    how = RUNS[name]
    got = worlds.once(ranks, training_jobs.train, how)[0]
    before, expected, norms = training_jobs.alone(how, ranks, got["told"])
    assert same(got["before"], before)
    check(got["after"], expected, before, STEPS, CLOSE.get(how.rule, 1e-5))
    assert got["norms"] == pytest.approx(norms, rel=1e-4)
    if how.max_norm:
        assert max(norms) > 1.5 * how.max_norm  # or it would show nothing


@pytest.mark.supports("parameters used by only some ranks", **of(training_jobs.ROUTED))
@pytest.mark.parametrize("ranks, name", params(ROUTED, QUICK_ROUTED))
def test_ranks_that_use_different_parameters_neither_hang_nor_drift(ranks, name):
    how = training_jobs.ROUTED[name]
    got = worlds.once(ranks, training_jobs.train_routed, how)[0]
    alone, steps = training_jobs.reference(how, ranks, got["told"])
    assert got["identical"]
    assert got["steps"] == steps
    close = CLOSE.get(how.rule, 1e-5)
    check_each(got["after"], alone.after, alone.before, training_jobs.ROUTED_STEPS, close)


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
