"""A wrong config ends all ranks of a script at once, and one of them shows the traceback."""

import os
import subprocess
import sys

import pytest

from tests.distributed.wrong_configs_jobs import WRONG
from tests.worlds import ROOT, free_port

pytestmark = pytest.mark.slow


def start(rank, port):
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.distributed.wrong_configs_jobs"]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | own, stderr=subprocess.PIPE, text=True
    )


def test_a_wrong_config_is_told_with_one_traceback():
    port = free_port()
    ranks = [start(rank, port) for rank in range(2)]
    try:
        first, other = (rank.communicate(timeout=90)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert first.count("Traceback (most recent call last)") == len(WRONG), first
    assert "Traceback" not in other, other
    lines = [line for line in other.splitlines() if line.startswith("[ds_ext] rank 1: ")]
    assert len(lines) == len(WRONG)
    for words, line in zip(WRONG, lines, strict=True):
        assert words in line and line.endswith("(traceback: rank 0)")
        assert line.removeprefix("[ds_ext] rank 1: ").partition(" (traceback")[0] in first
