"""Two hosts, whose ranks have the same local ranks, and folders that they do not share."""

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_ext.backward import reduction
from tests import worlds
from tests.common import models, updates
from tests.common.choose import params
from tests.distributed import training_jobs
from tests.distributed.training_jobs import Training

RUNS = {"stage 3": Training("adalomo", 3, max_norm=0.3), "stage 1": Training("adalomo", 1)}
RUNS |= {"stage 0": Training("came", 0), "plain": Training("adalomo", None)}


def train(name: str) -> dict[str, Any]:
    """Trains on two hosts of two ranks each, as launchers tell ranks of them.

    Returns the weights, and the buckets of every rank in the order in which they were sent.
    """
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "LOCAL_WORLD_SIZE": "2"}
    order: list[list[str]] = []
    send = reduction.Reduction.begin

    def noting(self: reduction.Reduction, params: Any, *given: Any) -> Any:
        order.append([self.layout.name(param) for param in params])
        return send(self, params, *given)

    with mock.patch.object(reduction.Reduction, "begin", noting):
        found = training_jobs.train(RUNS[name])
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, order)
    return found | {"orders": orders}


@pytest.mark.supports(
    "several hosts", stage=lambda name: RUNS[name].stage, optimizer=lambda name: RUNS[name].rule
)
@pytest.mark.parametrize("name", params(RUNS, []))
def test_local_ranks_that_are_not_the_ranks_change_nothing(name):
    got = worlds.once(4, train, name)[0]
    before, expected, _ = training_jobs.alone(RUNS[name], 4, got["told"])
    assert updates.error(got["after"], expected, before) <= 1e-5
    first, *others = got["orders"]
    assert len(first) >= 4 * training_jobs.STEPS and others == [first] * 3


@worlds.on(4)
def test_a_folder_that_each_host_has_for_itself_is_refused():
    rank = dist.get_rank()
    engine = training_jobs.start(Training("came", 3), models.make(dropout=0.3))
    with tempfile.TemporaryDirectory() as own:  # ranks 0 and 1 are the first host
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, own)
        os.chdir(hosts[rank // 2 * 2])
        with pytest.raises(RuntimeError, match="must lie on a file system that all ranks share"):
            engine.save_checkpoint("here", tag="mine")
        if rank == 0:
            Path("here/latest").write_text("mine")
        with pytest.raises(RuntimeError, match="file system that all ranks share"):
            engine.load_checkpoint("here")
        os.chdir("/")
        dist.barrier()
