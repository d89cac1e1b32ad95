"""Gradients kept projected on real ranks, against the textbook on whole matrices."""

import pytest
import torch

from tests import worlds
from tests.common import accumulated, models
from tests.common.choose import params
from tests.common.updates import error
from tests.distributed import fully_shard_jobs, pipelines_jobs, projected_grads_jobs
from tests.distributed.pipelines_jobs import ROWS, Run
from tests.distributed.projected_grads_jobs import HYPERS, PASSES, STEPS
from tests.distributed.test_pipelines import chain, merged

HOW = ("plain", "FSDP2", *projected_grads_jobs.ZERO)
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
    return {"plain": None, "FSDP2": "fsdp2"}.get(
        how, projected_grads_jobs.ZERO.get(how, {}).get("stage")
    )


@pytest.mark.supports(
    'gradient accumulation, `"projected"`', stage=stage_of, optimizer="GaLoreAdamW"
)
@pytest.mark.parametrize("how, ranks", params(CASES, QUICK))
def test_equals_the_textbook(how, ranks):
    got = worlds.run(ranks, projected_grads_jobs.train, how)[0]
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
    more = {"ds_ext": projected_grads_jobs.POLICY, "gradient_clipping": 0}
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
