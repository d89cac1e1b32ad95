"""Mixtures of experts on 2 and 4 ranks against one process that has all experts, each apart."""

import pytest
import torch

from tests import worlds
from tests.common import hypers
from tests.common.choose import pairs, params
from tests.common.updates import check_each, error
from tests.distributed import expert_parallel_jobs, experts_jobs
from tests.tools.support import of

RUNS = expert_parallel_jobs.RUNS | experts_jobs.RUNS
# What `make test` runs.
QUICK = [
    *("mixtral-clip-sharded", "autoep-tensor-adalomo", "moe-clip-sharded-stage2"),
    *("moe-json-muon-resumed", "moe-tensor-came-stage1-ep2"),
]
# The gap between singular values limits GaLore's basis (3e-5 on Intel, 6e-5 on AMD EPYC).
CLOSE = hypers.CLOSE | {"galoreadamw": 1e-4}
# APOLLO divides by the norms of rows and columns, and a router's are of few tokens.
CLOSE_OF_MOE = hypers.CLOSE | {"flashadamw": 1e-3, "apollo": 1e-4}


def _feature(name):
    run = RUNS[name]
    if run.tensor > 1:
        return "expert parallelism with tensor parallelism"
    if run.kind == "moe":
        return "`deepspeed.moe`, expert parallelism"
    return "expert parallelism by AutoEP" if run.ep else "Hugging Face's mixtures of experts"


# A rule does not know which ranks hold an expert: each by each model, wherever; then the ways.
RULES = pairs(RUNS, lambda name: (_feature(name), RUNS[name].kind, RUNS[name].rule), QUICK)
CHOSEN = pairs(RUNS, lambda name: (_feature(name), *RUNS[name].settings), RULES)


@pytest.mark.supports(_feature, **of(RUNS))
@pytest.mark.parametrize("name", params(CHOSEN, QUICK))
def test_equals_one_process_that_has_all_experts(name):
    run = RUNS[name]
    is_moe, size = run.kind == "moe", run.then[1] if run.then else run.ep
    jobs = expert_parallel_jobs if is_moe else experts_jobs
    ranks = worlds.once(run.world, jobs.train, run)
    streams = {n: i for rank in ranks for n, i in rank["streams"].items()}
    (before, after, norms), idle = jobs.reference(run, streams)
    close = (CLOSE_OF_MOE if is_moe else CLOSE).get(run.rule, 1e-5)
    whole = 3e-5 if run.rule == "galoreadamw" and not is_moe else close
    held = set()
    for rank in ranks:
        held |= rank["after"].keys()
        expected = {n: after[n] for n in rank["after"]}
        check_each(rank["after"], expected, before, jobs.STEPS, close)
        assert error(rank["after"], expected, before) <= whole
        assert rank["norms"] == pytest.approx(norms, rel=whole)
        # "wide", its bias, and "narrow"; or matrices of attention
        assert rank["divided"] == (0 if run.tensor == 1 else 3 if is_moe else 8)
        if is_moe:
            assert rank["steps"] == {jobs.STEPS}
        else:
            assert rank["kept"] == {4 // max(1, size)}
    assert held == after.keys()
    for n in held:  # the same bits wherever it is
        every = [rank["after"][n] for rank in ranks if n in rank["after"]]
        if is_moe:
            assert len(every) == (run.world // size if "experts" in n else run.world)
        assert all(torch.equal(p, every[0]) for p in every)
    assert not run.max_norm or max(norms) > run.max_norm
    # The routing is what it is for: experts that are idle on one rank, and on all.
    some = idle.any(1) & ~idle.all(1)
    assert some.any() and idle.all(1).any() and not idle[0].all(0).any()
    if not is_moe and run.ep == 2 and run.rule == "came":  # on all experts that one rank has
        assert idle.all(1).unflatten(-1, (2, 2)).all(-1).any()


def test_what_is_not_supported_is_refused_on_every_rank():
    worlds.run(2, expert_parallel_jobs.refusals)


@pytest.mark.parametrize("stage, tensor", params([(0, 1), (2, 1), (1, 2)], [(2, 1)]))
def test_an_expert_whose_gradient_is_not_finite_is_skipped_on_all_ranks(stage, tensor):
    worlds.run(2 * tensor, expert_parallel_jobs.not_finite, stage, tensor)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_routers_are_recorded_after_autoep_has_replaced_them(kind):
    """DeepSpeed 0.19.8 by itself ends in a TypeError with transformers 5.23."""
    for shapes in worlds.once(2, experts_jobs.recorded, kind):
        assert shapes == [(6, 4)] * 2  # tokens and experts, of each layer
