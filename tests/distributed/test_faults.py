"""Ranks that are killed, late, out of disk or different, and files that are damaged; two hosts.

``--kills 100`` makes the soak as long as that.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ds_ext import newest_checkpoint
from ds_ext.backward import reduction
from tests import worlds
from tests.common import models, updates
from tests.common.choose import params
from tests.common.updates import error
from tests.distributed import faults_jobs, training_jobs
from tests.distributed.faults_jobs import FAULTS, KIND, TOTAL, WHEN, stage_of
from tests.distributed.resume_jobs import same
from tests.distributed.training_jobs import Training

LOST = "LostRankError: another rank has ended, or did not respond within the time limit"
# What the newest complete checkpoint is after a fault in the step after WHEN, and how ranks end.
AFTER = {"disk full": TOTAL, "no folder": TOTAL}
QUICK = ["save"]  # a rank is killed while it saves


@pytest.mark.supports(
    "killed ranks, lost hosts, full disks", stage=lambda fault: stage_of(fault), optimizer=KIND
)
@pytest.mark.parametrize("fault", params(FAULTS, QUICK))
def test_after_a_fault_ranks_end_and_the_newest_complete_checkpoint_loads(tmp_path, fault):
    got = faults_jobs.suffer(str(tmp_path), fault, stage_of(fault))
    check_ends(got["failed"], fault)
    whole = worlds.once(2, faults_jobs.unbroken)
    assert got["found"].steps == AFTER.get(fault, WHEN)
    for rank, again in enumerate(got["again"]):
        assert again.code == 0, again.output[-2000:]
        assert again.result["first"] == got["found"].steps
        assert same(again.result["weights"], whole[rank]["weights"])
    assert not [name for name in got["left"] if name.startswith(".")]


def check_ends(failed, fault):
    """The other ranks end with a clear error in time, unless training goes on."""
    if fault in ("disk full", "no folder"):
        for rank in failed:
            assert rank.code == 0, rank.output[-2000:]
            told = rank.result["told"]
            assert [bool(text) for text in told] == [step == WHEN for step in range(TOTAL)]
            words = f"global_step{WHEN + 1} could not be saved.*rank 1: .*MiB are free"
            assert re.search(words, told[WHEN])
        return
    other, victim = failed
    assert LOST in other.output and other.code == 1 and other.seconds < 30
    assert victim.code == (1 if fault in ("forward", "late") else -9)
    if fault == "forward":
        assert "this rank's forward fails" in victim.output


def test_a_rank_says_which_ranks_do_not_save(tmp_path):
    first, second = worlds.run(2, faults_jobs.late, str(tmp_path))
    (warning,) = (text for text in first["late"] if "waited" in text)
    assert warning.startswith("rank 0 has waited in save_checkpoint for 0.5 s: rank 1 has not call")
    assert 'not only rank 0 (remove "if rank == 0")' in warning
    for name, function in {"weights": "save_16bit_model (", "reading": "safe_get_full_*"}.items():
        (warning,) = (text for text in first[name] if "waited" in text)
        assert f"waited in {function}" in warning and "rank 1 has not called it" in warning
    others = [*sum(second.values(), []), *first["together"]]
    assert not [text for text in others if "waited" in text]
    assert newest_checkpoint(tmp_path).tag == "a"


def test_a_checkpoint_that_is_damaged_or_of_something_else_is_named_and_not_loaded(tmp_path):
    worlds.run(2, faults_jobs.damage, str(tmp_path / "run"))


def test_ranks_that_differ_are_told_so_at_once():
    worlds.run(2, faults_jobs.differ)


@pytest.mark.slow
def test_a_thousand_steps_take_no_memory():
    for rank in worlds.fresh(1, faults_jobs.endure, 1000, timeout=60):
        assert rank.code == 0, rank.output[-2000:]
        seen = rank.result["seen"]
        assert len(seen) == 10
        assert len({(tensors, elements) for tensors, elements, _ in seen[1:]}) == 1
        resident = [kilobytes for *_, kilobytes in seen]
        assert resident[-1] - resident[1] < 2048


@pytest.mark.slow
@pytest.mark.soak
def test_kills_at_random_moments_lose_nothing_that_was_saved(tmp_path, request):
    kills = request.config.getoption("kills")
    got = faults_jobs.soak(str(tmp_path), kills)
    assert len(got["reached"]) == kills
    assert not got["lost"] and got["reached"] == sorted(got["reached"])
    for ranks in got["moments"]:
        assert [rank.code for rank in ranks].count(-9) == 1
        for rank in ranks:
            assert rank.code == -9 or (rank.code == 1 and re.search(LOST, rank.output)), rank.output
    final = got["final"]
    assert final.code == 0, final.output[-2000:]
    run = final.result
    assert run["steps"] == got["reached"][-1] > 0
    assert error(run["found"], run["exact"], run["before"]) < 1e-5


# Two hosts, whose ranks have the same local ranks, and folders that they do not share.
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
