"""deepspeed.moe's layers on 2 and 4 ranks against one process that has all experts."""

import pytest
import torch

from tests import worlds
from tests.common import hypers
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import expert_parallel_jobs
from tests.distributed.expert_parallel_jobs import RUNS, STEPS, values
from tests.tools.support import of

# What `make test` runs.
QUICK = [*("clip-sharded-stage2", "json-muon", "resumed-ep4", "tensor-came-stage1-ep2")]


# APOLLO divides by the norms of rows and columns, and a router's are of few tokens.
CLOSE = hypers.CLOSE | {"flashadamw": 1e-3, "apollo": 1e-4}


def _feature(name):
    return expert_parallel_jobs.beside(RUNS[name]) or "`deepspeed.moe`, expert parallelism"


@pytest.mark.supports(_feature, **of(RUNS))
@pytest.mark.parametrize("name", params(RUNS, QUICK))
def test_equals_one_process_that_has_all_experts(name):
    run, before = RUNS[name], values()
    ranks = worlds.once(run.world, expert_parallel_jobs.train, run)
    streams = {n: i for rank in ranks for n, i in rank["streams"].items()}
    model, norms, idle = expert_parallel_jobs.reference(run, streams)
    after = {n: p.detach() for n, p in model.named_parameters()}
    held = set()
    for rank in ranks:
        held |= rank["after"].keys()
        expected = {n: after[n] for n in rank["after"]}
        check_each(rank["after"], expected, before, STEPS, CLOSE.get(run.rule, 1e-5))
        assert set(rank["steps"].values()) == {STEPS}
        assert len(rank["divided"]) == (3 if run.tensor > 1 else 0)  # "wide", its bias, "narrow"
        assert rank["norms"] == pytest.approx(norms, rel=CLOSE.get(run.rule, 1e-5))
        if run.max_norm:
            assert max(norms) > run.max_norm
    assert held == after.keys()
    for n in held:  # the same bits wherever it is
        every = [rank["after"][n] for rank in ranks if n in rank["after"]]
        size = run.then[1] if run.then else run.size
        assert len(every) == (run.world // size if "experts" in n else run.world)
        assert all(torch.equal(p, every[0]) for p in every)
    some = idle.any(1) & ~idle.all(1)
    assert some.any() and idle.all(1).any() and not idle[0].all(0).any()


def test_what_is_not_supported_is_refused_on_every_rank():
    for stage3, fused, divided, mpu in worlds.once(2, expert_parallel_jobs.refusals):
        assert "Native DeepSpeed MoE is not supported with ZeRO Stage 3" in stage3
        assert "fuse_into_backward" in fused and "deepspeed.initialize" in fused
        assert "leave out mpu" in mpu and "tensor_parallel.autotp_size" in mpu
        assert divided.startswith("tensor_parallel.partition_config")


@pytest.mark.parametrize("stage, tensor", params([(0, 1), (2, 1), (1, 2)], [(2, 1)]))
def test_an_expert_whose_gradient_is_not_finite_is_skipped_on_all_ranks(stage, tensor):
    """And so is the expert that another rank has in its place."""
    for rank, ended in enumerate(
        worlds.once(2 * tensor, expert_parallel_jobs.not_finite, stage, tensor)
    ):
        assert ended["same"] == {f"layers.0.experts.{2 * (rank % 2) + 1}.0.weight"}
        assert ended["skipped"] == 1 and ended["finite"]
