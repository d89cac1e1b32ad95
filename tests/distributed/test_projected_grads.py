"""Gradients kept projected on real ranks, against the textbook on whole matrices."""

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import ds_ext
from tests import worlds
from tests.common import accumulated, engines, models
from tests.common.choose import params
from tests.common.ranks import identical, message, whole
from tests.common.updates import error
from tests.distributed import fully_shard_jobs, pipelines_jobs
from tests.distributed.pipelines_jobs import ROWS, Run
from tests.distributed.test_pipelines import chain, merged

STEPS, PASSES = 4, 3
HYPERS: dict[str, Any] = {
    "lr": 0.02,
    "rank": 3,
    "update_proj_gap": 2,
    "weight_decay": 0.1,
    "eps": 1e-3,
}
POLICY = {"gradient_policy": "projected"}
ZERO: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "zero.Init": {"stage": 3},
}


def config(stage: dict[str, Any]) -> dict[str, Any]:
    return engines.config(
        **stage,
        gradient_accumulation_steps=PASSES,
        optimizer={"type": "GaLoreAdamW", "params": HYPERS},
        ds_ext=POLICY,
        zero={"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30},
    )


def batch(step: int, number: int) -> torch.Tensor:
    """The tokens of a micro-batch, for all ranks."""
    return models.batch(PASSES * step + number, dist.get_world_size())


def train(how: str) -> dict[str, Any]:
    """Weights before and after, the rank and weight decay of each parameter, and the norms."""
    return _by_hand(how) if how in ("plain", "FSDP2") else _by_engine(how)


def _told(module: Any, optimizer: Any, norms: list[float], **more: Any) -> dict[str, Any]:
    after = fully_shard_jobs.whole(module) if more.pop("in_parts", False) else whole(module)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    keys = ("rank", "weight_decay")
    return {
        "after": after,
        "identical": identical(after),
        "groups": {
            n: [groups[p][key] for key in keys] for n, p in module.named_parameters() if p in groups
        },
        "norms": norms,
        **more,
    }


def _by_hand(how: str) -> dict[str, Any]:
    """Steps by ``fuse_into_backward``."""
    rank, in_parts = dist.get_rank(), how == "FSDP2"
    model = fully_shard_jobs.shard(fully_shard_jobs.apart()) if in_parts else models.make()
    before = fully_shard_jobs.whole(model) if in_parts else whole(model)
    optimizer = ds_ext.GaLoreAdamW.for_model(model, **HYPERS)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=300, **POLICY)
    norms = []
    for step in range(STEPS):
        for i in range(PASSES):
            (model(batch(step, i)[rank], step=step) / PASSES).backward()
        optimizer.step()
        norms.append(fused.norm)
    return _told(model, optimizer, norms, before=before, in_parts=in_parts)


def _by_engine(how: str) -> dict[str, Any]:
    made = config(ZERO[how])
    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=made):
            model = models.make()
        filled = models.make()
        for p, q in zip(model.parameters(), filled.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                p.data.copy_(q.data)
    else:
        model = models.make()
    engine = deepspeed.initialize(model=model, config=made)[0]
    before, norms, refused = whole(engine.module), [], []
    for step in range(STEPS):
        for i in range(PASSES):
            engine.backward(engine(batch(step, i)[dist.get_rank()], step=step))
            if step == 1 and i == 0:
                refused = [
                    message(lambda: engine.save_checkpoint("not written")),
                    message(lambda: safe_get_full_grad(engine.module.up.weight)),
                ]
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return _told(engine.module, engine.optimizer, norms, before=before, refused=refused)


HOW = ("plain", "FSDP2", *ZERO)
CASES = [(how, ranks) for how in HOW for ranks in (2, 3)]
QUICK = [("FSDP2", 2), ("stage 2", 3), ("stage 3", 2)]


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
            tokens = models.batch(PASSES * step + i, ranks)
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
    return {"plain": None, "FSDP2": "fsdp2"}.get(how, ZERO.get(how, {}).get("stage"))


@pytest.mark.supports(
    'gradient accumulation, `"projected"`', stage=stage_of, optimizer="GaLoreAdamW"
)
@pytest.mark.parametrize("how, ranks", params(CASES, QUICK))
def test_equals_the_textbook(how, ranks):
    got = worlds.run(ranks, train, how)[0]
    assert got["identical"]
    projected = {n for n, (rank, _) in got["groups"].items() if rank is not None and "weight" in n}
    assert {"up.weight", "down.weight", "shared.weight", "odd.weight"} <= projected
    assert "embed.weight" not in projected
    model = fully_shard_jobs.apart() if how == "FSDP2" else models.make()
    expected, norms = reference(ranks, got["groups"], model)
    for name in ("up.weight", "odd.weight"):
        assert error(got["after"], {name: expected[name]}, got["before"]) <= 1e-4
    assert error(got["after"], expected, got["before"]) <= 1e-5
    assert got["norms"] == pytest.approx(norms, rel=1e-4)
    if "refused" in got:
        assert "call it after the step" in got["refused"][0]
        assert '"gradient_policy": "sharded"' in got["refused"][1]


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
