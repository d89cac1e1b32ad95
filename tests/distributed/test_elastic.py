"""torchrun --max-restarts: a killed rank is started again, a lost host is done without."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import worlds
from tests.common.updates import error
from tests.distributed import elastic_jobs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def agent(port: int, folder: Path, hosts: str, log: Path) -> subprocess.Popen:
    """One host of one rank."""
    conf = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=200"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"]
    command += ["--nproc_per_node=1", "--max-restarts=5", "--monitor-interval=0.2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"]
    command += [f"--rdzv-conf={conf}", "-m", "tests.distributed.elastic_jobs", str(folder)]
    # Torch's agents may share a store whose entries outlive a restart that only one of them counts.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | own_store
    with open(log, "w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def keeps_store(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def told(folder: Path, rank: int) -> list[list[str]]:
    file = folder / f"told.{rank}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition, agents, logs, seconds=240):
    until = time.monotonic() + seconds
    while not (found := condition()):
        late = time.monotonic() > until
        ended = any(a.poll() not in (None, 0, -signal.SIGKILL) for a in agents)
        text = "".join(log.read_text()[-3000:] for log in logs)
        assert not late and not ended, text
        time.sleep(0.05)
    return found


@pytest.mark.supports("killed ranks, lost hosts, full disks", stage=3, optimizer="CAME")
def test_a_run_survives_a_killed_rank_and_a_lost_host(tmp_path):
    port = worlds.free_port()
    folder, logs = tmp_path / "run", [tmp_path / "first.log", tmp_path / "second.log"]
    folder.mkdir()
    agents = [agent(port, folder, "1:2", logs[0])]  # it keeps the store
    try:
        wait_for(lambda: keeps_store(port), agents, logs[:1])
        agents.append(agent(port, folder, "1:2", logs[1]))

        def saved(world, more_than=0):
            lines = [line for line in told(folder, 0) if line[0] == "saved" and line[2] == world]
            return lines[-1] if lines and int(lines[-1][3]) > more_than else None

        reached = int(wait_for(lambda: saved("2", 3), agents, logs)[3])
        os.kill(int(told(folder, 1)[-1][1]), signal.SIGKILL)  # a rank
        reached = int(wait_for(lambda: saved("2", reached + 3), agents, logs)[3])
        os.killpg(agents[1].pid, signal.SIGKILL)  # a host
        for line in told(folder, 1)[-1:]:
            os.kill(int(line[1]), signal.SIGKILL)
        wait_for(lambda: (folder / "weights.pt").exists(), agents, logs)
        agents[0].wait(60)
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
    starts = [line for line in told(folder, 0) if line[0] == "start"]
    sizes, firsts = [line[2] for line in starts], [int(line[3]) for line in starts]
    assert sizes[0] == "2" and sizes[-1] == "1" and sizes.count("2") >= 2
    assert firsts == sorted(firsts) and firsts[-1] >= reached - 1
    found = torch.load(folder / "weights.pt")
    alone = worlds.run(2, elastic_jobs.whole_run)[0]
    assert error(found, alone["after"], alone["before"]) < 1e-5
