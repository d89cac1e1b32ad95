"""Gradients kept projected on real ranks, against the textbook on whole matrices."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import ds_ext
from tests import worlds
from tests.common import accumulated, engines, models
from tests.common.choose import params
from tests.common.ranks import REFUSALS, identical, whole
from tests.common.updates import error
from tests.distributed import fully_shard_jobs, pipelines_jobs, training_jobs, zero_jobs
from tests.distributed.pipelines_jobs import ROWS, Run
from tests.distributed.test_pipelines import chain, merged
from tests.distributed.training_jobs import Training

STEPS, PASSES = 4, 3
HYPERS: dict[str, Any] = {
    "lr": 0.02,
    "rank": 3,
    "update_proj_gap": 2,
    "weight_decay": 0.1,
    "eps": 1e-3,
}
POLICY = {"gradient_policy": "projected"}
STAGES = {f"stage {stage}": stage for stage in range(4)} | {"zero.Init": 3}
RUNS = {
    how: Training(
        "galoreadamw", stage, "projected", accumulation=PASSES, own=HYPERS, is_json=True,
        zero_init=how == "zero.Init", dropout=0.0, bucket=300,
    )
    for how, stage in STAGES.items()
}  # fmt: skip
BY_HAND = Training("galoreadamw", None, accumulation=PASSES, dropout=0.0)


def train(how: str) -> dict[str, Any]:
    """Weights before and after, the rank and weight decay of each parameter, and the norms."""
    run, weights = RUNS.get(how, BY_HAND), whole
    if how in RUNS:
        engine = training_jobs.start(run, zero_jobs.build(run))
    else:
        model = models.make()
        if how == "FSDP2":
            model, weights = (
                fully_shard_jobs.shard(fully_shard_jobs.apart()),
                fully_shard_jobs.whole,
            )
        optimizer = ds_ext.GaLoreAdamW.for_model(model, **HYPERS)
        engine = engines.Fused(model, optimizer, PASSES, bucket_size=300, **POLICY)
    module, rank, world = engine.module, dist.get_rank(), dist.get_world_size()
    before, norms = weights(module), []
    for step in range(STEPS):
        for part in range(PASSES):
            engine.backward(training_jobs.loss_of(engine, run, step, part, rank, world))
            if how in RUNS and (step, part) == (1, 0):
                with pytest.raises(REFUSALS, match="call it after the step"):
                    engine.save_checkpoint("not written")
                with pytest.raises(REFUSALS, match='"gradient_policy": "sharded"'):
                    safe_get_full_grad(module.up.weight)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    after, keys = weights(module), ("rank", "weight_decay")
    groups = {
        p: [g[key] for key in keys] for g in engine.optimizer.param_groups for p in g["params"]
    }
    assert identical(after)
    told = {n: groups[p] for n, p in module.named_parameters() if p in groups}
    return {"before": before, "after": after, "norms": norms, "groups": told}


HOW = ("plain", "FSDP2", *RUNS)
CASES = [(how, ranks) for how in HOW for ranks in (2, 3)]


def reference(ranks, groups, model):
    """Trains ``model`` in fp64 on the micro-batches of all ranks -> its weights, and the norms."""
    model, norms, books = model.double(), [], {}
    given = {"lr": HYPERS["lr"], "eps": HYPERS["eps"]}
    named = dict(model.named_parameters())
    for name, (rank, weight_decay) in groups.items():
        books[name] = accumulated.Textbook(
            named[name], rank, HYPERS["update_proj_gap"], weight_decay=weight_decay, **given
        )
    for step in range(STEPS):
        micro = {name: [] for name in books}
        for i in range(PASSES):
            model.zero_grad()
            tokens = models.batch(10 * step + i, ranks)
            (sum(model(x, step=step) for x in tokens) / ranks / PASSES).backward()
            for name in books:
                if named[name].grad is not None:
                    micro[name].append(named[name].grad.clone())
        square = 0.0
        for name, book in books.items():
            if micro[name]:
                book.step(micro[name])
                square += book.square
                with torch.no_grad():
                    named[name].copy_(book.p)
        norms.append(square**0.5)
    return {n: p.detach() for n, p in named.items()}, norms


def stage_of(how):
    return "fsdp2" if how == "FSDP2" else STAGES.get(how)


@pytest.mark.supports(
    'gradient accumulation, `"projected"`', stage=stage_of, optimizer="GaLoreAdamW"
)
@pytest.mark.parametrize("how, ranks", params(CASES, [("stage 2", 2)]))
def test_equals_the_textbook(how, ranks):
    got = worlds.run(ranks, train, how)[0]
    projected = {n for n, (rank, _) in got["groups"].items() if rank is not None and "weight" in n}
    assert {"up.weight", "down.weight", "shared.weight", "odd.weight"} <= projected
    assert "embed.weight" not in projected
    model = fully_shard_jobs.apart() if how == "FSDP2" else models.make()
    expected, norms = reference(ranks, got["groups"], model)
    for name in ("up.weight", "odd.weight"):
        assert error(got["after"], {name: expected[name]}, got["before"]) <= 1e-4
    assert error(got["after"], expected, got["before"]) <= 1e-5
    assert got["norms"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_pipelines_equal_the_textbook(zero):
    """Tied weights, whose gradients come from two stages, are kept whole."""
    more = {"ds_ext": POLICY, "gradient_clipping": 0}
    run = Run("galoreadamw", HYPERS, 2, zero, more, client=True)
    results = worlds.run(2, pipelines_jobs.train, run)
    before, after = merged(results, "before"), merged(results, "after")
    model = chain(before).double()
    given = {key: HYPERS[key] for key in ("lr", "weight_decay", "eps")}
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    books = {
        n: accumulated.Textbook(p, HYPERS["rank"], HYPERS["update_proj_gap"], **given)
        for n, p in named.items()
    }
    for step in range(pipelines_jobs.STEPS):
        losses = [model(own) / 4 for own in pipelines_jobs.rows(step).split(ROWS // 4)]
        grads = [torch.autograd.grad(x, list(named.values()), allow_unused=True) for x in losses]
        for (name, book), micro in zip(books.items(), zip(*grads, strict=True), strict=True):
            if micro[0] is not None:
                book.step([sum(micro)] if name.startswith("tied") else micro)
                with torch.no_grad():
                    named[name].copy_(book.p)
    expected = {n: p.detach() for n, p in named.items()}
    assert error(after, expected, before) <= 1e-5
    assert any(n.startswith("tied") and p.dim() == 2 for n, p in named.items())
