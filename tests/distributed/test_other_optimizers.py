"""DeepSpeed engines with optimizers of others take no path of ours."""

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.other_optimizers_jobs import PROGRAMS
from tests.worlds import ROOT, free_port

pytestmark = pytest.mark.slow

WAYS = ("imported", "beside")


def start(way, rank, port):
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.other_optimizers_jobs", way]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | own, **out)


@pytest.fixture(scope="module")
def told():
    """What each rank tells, by way."""
    found = {}
    for way in ("plain", *WAYS):
        port = free_port()
        ranks = [start(way, rank, port) for rank in range(2)]
        try:
            outputs = [rank.communicate(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        found[way] = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_results_collectives_logs_and_errors_are_those_of_deepspeed(told, way, name):
    for plain, other in zip(told["plain"], told[way], strict=True):
        assert other["seen"][name] == plain["seen"][name]


@pytest.mark.parametrize("way", WAYS)
def test_globals_are_those_of_deepspeed(told, way):
    for plain, other in zip(told["plain"], told[way], strict=True):
        assert other["globals"] == plain["globals"]


def test_an_engine_of_ours_beside_others_trains_as_alone(told):
    for rank in told["beside"]:
        assert rank["own"] == rank["alone"]


def test_the_programs_train_and_fail(told):
    """Or nothing would be compared."""
    for rank, plain in enumerate(told["plain"]):
        failed = {name for name, seen in plain["seen"].items() if seen["error"]}
        assert failed == {"wrong config", "unknown type", "failing ranks", "foreign file"}
        assert f"ValueError: an error of rank {rank}" in plain["seen"]["failing ranks"]["error"][0]
        assert plain["seen"]["stage 3"]["collectives"] and plain["seen"]["stage 3"]["logs"]
    assert told["plain"][0]["seen"]["rank 0 alone"]["result"]
