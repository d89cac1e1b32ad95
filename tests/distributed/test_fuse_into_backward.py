"""``fuse_into_backward`` on two ranks: parameters that come later, and buffers as they lie."""

import pytest
import torch

from tests import worlds
from tests.common.states import same
from tests.common.updates import check_each
from tests.distributed import fuse_into_backward_jobs

WORLD = 2
HOW = {"fused": {}, "small buckets": {"bucket_size": 10}, "sharded": {"gradient_policy": "sharded"}}
HOW |= {"clipped": {"max_grad_norm": 0.3}}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_unfrozen_and_added_parameters_are_stepped_by_the_gradients_of_all_ranks(how):
    before, expected, _ = fuse_into_backward_jobs.alone(WORLD, how.get("max_grad_norm", 0.0))
    first, second = worlds.run(WORLD, fuse_into_backward_jobs.train, how)
    assert same(first, second)
    check_each(first, expected, before)
    assert not any(torch.equal(p, before[n]) for n, p in expected.items())


def test_what_no_hook_would_step_is_refused_on_all_ranks():
    for got in worlds.run(WORLD, fuse_into_backward_jobs.strangers):
        assert got["unmoved"] and len(got["told"]) == 2
        assert "not part of the model" in got["told"][0]
        assert "second.weight has a gradient that did not come from backward" in got["told"][1]
        assert "DistributedDataParallel writes .grad too" in got["told"][1]


def test_buffers_arrive_however_they_lie_in_memory():
    first, second = worlds.run(WORLD, fuse_into_backward_jobs.buffers)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert first["kept"]
    assert first["flags"].tolist() == [[True, False]] * 3
