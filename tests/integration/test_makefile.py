"""The Makefile chooses the build of torch: from an index of CPU builds where there is no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def folder(tmp_path):
    """A copy of what make reads, and an environment whose pip notes its arguments."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    own = tmp_path / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(sys.executable)
    (own / "pip").write_text('#!/bin/sh\necho "$@" >> pip.log\n')
    (own / "pip").chmod(0o755)
    return tmp_path


def make(folder, *args):
    given = {"MAKEFLAGS", "TORCH", "TORCH_INDEX", "NVIDIA"}  # what this run's own make was told
    done = subprocess.run(
        ["make", ".venv/.base", *args],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in given},
        text=True,
        capture_output=True,
        check=True,
    )
    log = folder / "pip.log"
    return done.stdout, log.read_text().splitlines()[0] if log.exists() else ""


def test_without_an_index_that_answers_pip_chooses(folder):
    said, asked = make(folder, "TORCH_INDEX=http://127.0.0.1:9", "TORCH=torch==2.13.0")
    assert asked == "install --quiet torch==2.13.0"
    assert "http://127.0.0.1:9 cannot be reached: pip chooses" in said


@pytest.mark.parametrize(
    "given, index", [("NVIDIA=", CPU), ("NVIDIA=/dev/nvidia0", ""), ("TORCH_INDEX=", "")]
)
def test_the_index_of_cpu_builds_is_for_machines_without_a_gpu(folder, given, index):
    said, _ = make(folder, "-n", given)
    assert f'index="{index}"' in said
