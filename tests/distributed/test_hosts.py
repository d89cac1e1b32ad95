"""Two hosts on one machine: an agent of torch's or DeepSpeed's launcher for each, in folders of
their own, with the same local ranks; against one process."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import worlds
from tests.common import updates
from tests.common.choose import params
from tests.distributed import hosts_jobs, training_jobs
from tests.distributed.hosts_jobs import RUNS

ROOT = Path(__file__).parents[2]


def torchs(host: int, port: int) -> list[str]:
    """torchrun, two ranks a host."""
    command = ["torch.distributed.run", "--nnodes=2", f"--node_rank={host}", "--nproc_per_node=2"]
    return [
        *command,
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
        "-m",
        "tests.distributed.hosts_jobs",
    ]


def deepspeeds(host: int, port: int) -> list[str]:
    """What `deepspeed --hostfile` starts on each host: here one rank a host."""
    world = base64.urlsafe_b64encode(json.dumps({"first": [0], "second": [0]}).encode()).decode()
    command = ["deepspeed.launcher.launch", f"--world_info={world}", f"--node_rank={host}"]
    command += ["--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"]
    return [*command, "--module", "tests.distributed.hosts_jobs"]


def launch(launcher, folder: Path, *cases: str):
    """Runs both hosts -> what hosts_jobs.py found."""
    port = worlds.free_port()
    shared, out = folder / "shared", folder / "results.pt"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    agents, logs = [], []
    for host in (0, 1):
        own = folder / f"host{host}"
        own.mkdir()
        logs.append(own / "log.txt")
        with open(logs[-1], "w") as log:
            command = [sys.executable, "-m", *launcher(host, port), str(out), str(shared), *cases]
            agents.append(
                subprocess.Popen(command, cwd=own, env=environment, stdout=log, stderr=log)
            )
    try:
        codes = [agent.wait(300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0, 0], "".join(log.read_text()[-3000:] for log in logs)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return launch(torchs, tmp_path_factory.mktemp("torch"))


def error(got, run, world: int) -> float:
    """‖difference‖ / ‖update‖ to one process with the global batch."""
    expected = training_jobs.Reference(run).train(world)
    return updates.error(got["after"], expected, got["before"])


@pytest.mark.supports(
    "several hosts", stage=lambda name: RUNS[name].stage, optimizer=lambda name: RUNS[name].rule
)
@pytest.mark.parametrize("name", params(RUNS, ["stage 3"]))
def test_local_ranks_that_are_not_the_ranks_change_nothing(name):
    got = worlds.once(4, hosts_jobs.on_two_hosts, name)[0]
    assert error(got, RUNS[name], 4) <= 1e-5
    first, *others = got["orders"]
    assert len(first) >= 4 * training_jobs.STEPS and others == [first] * 3


@pytest.mark.slow
def test_the_hosts_have_the_same_local_ranks_and_folders_of_their_own(seen):
    ranks, locals_, worlds, folders = zip(*seen["ranks"], strict=True)
    assert ranks == ("0", "1", "2", "3") and locals_ == ("0", "1", "0", "1")
    assert set(worlds) == {"4"} and [Path(f).name[-1] for f in folders] == ["0", "0", "1", "1"]


@pytest.mark.slow
@pytest.mark.supports(
    "several hosts", stage=lambda name: RUNS[name].stage, optimizer=lambda name: RUNS[name].rule
)
@pytest.mark.parametrize("name", RUNS)
def test_two_hosts_equal_one_process(seen, name):
    assert "error" not in seen[name], seen[name]["error"]
    assert error(seen[name], RUNS[name], 4) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_buckets_travel_in_the_same_order_on_every_rank(seen, name):
    first, *others = seen[name]["orders"]
    assert len(first) >= 4 * training_jobs.STEPS and others == [first] * 3


@pytest.mark.slow
def test_a_local_rank_in_the_place_of_a_rank_would_be_seen(seen):
    got = seen["local for global"]
    assert "error" not in got, got["error"]
    assert not error(got, RUNS["stage 1"], 4) <= 1e-2


@pytest.mark.slow
def test_a_checkpoint_is_of_all_hosts_or_refused(seen):
    got = seen["checkpoint"]
    assert "error" not in got, got["error"]
    assert got["equal"]
    for saving, loading in got["told"]:
        assert saving.startswith("CheckpointError") and loading.startswith("CheckpointError")
        assert "the folder must lie on a file system that all ranks share" in saving
        assert "file system that all ranks share" in loading


@pytest.mark.slow
@pytest.mark.supports("several hosts", stage=3, optimizer="AdaLomo")
def test_two_hosts_of_deepspeeds_launcher_equal_one_process(tmp_path):
    seen = launch(deepspeeds, tmp_path, "stage 3")
    assert [rank[:3] for rank in seen["ranks"]] == [["0", "0", "2"], ["1", "0", "2"]]
    assert "error" not in seen["stage 3"], seen["stage 3"]["error"]
    assert error(seen["stage 3"], RUNS["stage 3"], 2) <= 1e-5
