"""Hugging Face's mixtures of experts on 2 and 4 ranks against one process, experts apart there."""

import pytest
import torch

from tests import worlds
from tests.common import hypers
from tests.common.choose import params
from tests.common.updates import check_each, error
from tests.distributed import expert_parallel_jobs, experts_jobs
from tests.distributed.experts_jobs import RUNS, STEPS
from tests.tools.support import of

# What `make test` runs.
QUICK = [
    *("mixtral-clip-sharded", "mixtral-resumed", "gpt-oss-stage3", "qwen3-muon-stage3"),
    *("autoep-lomo", "autoep-tensor-adalomo"),
]


def _feature(name):
    run = RUNS[name]
    if beside := expert_parallel_jobs.beside(run):
        return beside
    return "expert parallelism by AutoEP" if run.ep else "Hugging Face's mixtures of experts"


# A basis of GaLore's is as exact as the gap between singular values allows (3e-5 on Intel, 6e-5 on
# AMD EPYC).
CLOSE = hypers.CLOSE | {"galoreadamw": 1e-4}


@pytest.mark.supports(_feature, **of(RUNS))
@pytest.mark.parametrize("name", params(RUNS, QUICK))
def test_equals_one_process_whose_experts_are_parameters_of_their_own(name):
    run = RUNS[name]
    ranks = worlds.once(run.world, experts_jobs.train, run)
    before, after, norms, idle = experts_jobs.reference(
        run, {n: i for rank in ranks for n, i in rank["streams"].items()}
    )
    held = set()
    for rank in ranks:
        held |= rank["after"].keys()
        expected = {n: after[n] for n in rank["after"]}
        check_each(rank["after"], expected, before, STEPS, CLOSE.get(run.rule, 1e-5))
        whole = (CLOSE | {"galoreadamw": 3e-5}).get(run.rule, 1e-5)
        assert error(rank["after"], expected, before) <= whole
        assert rank["norm"] == pytest.approx(norms[-1], rel=whole)
        assert len(rank["divided"]) == (8 if run.tensor > 1 else 0)  # of attention
        assert rank["kept"] == {4 // max(1, run.then[1] if run.then else run.ep)}
    assert held == after.keys()
    for n in held:  # the same bits wherever it is
        every = [rank["after"][n] for rank in ranks if n in rank["after"]]
        assert all(torch.equal(p, every[0]) for p in every)
    assert not run.max_norm or max(norms) > run.max_norm
    # The routing is what it is for: experts that are idle on one rank, and on all.
    some = idle.any(1) & ~idle.all(1)
    assert some.any() and idle.all(1).any() and not idle[0].all(0).any()
    if run.ep == 2 and run.rule == "came":  # on all experts that one rank has
        assert idle.all(1).unflatten(-1, (2, 2)).all(-1).any()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_routers_are_recorded_after_autoep_has_replaced_them(kind):
    """DeepSpeed 0.19.8 by itself ends in a TypeError with transformers 5.23."""
    for shapes in worlds.once(2, experts_jobs.recorded, kind):
        assert shapes == [(6, 4)] * 2  # tokens and experts, of each layer
