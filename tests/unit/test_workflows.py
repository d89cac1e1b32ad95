"""Workflows, the Makefile and planted faults: actions are pinned, and what is named exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from benchmarks.__main__ import BENCHMARKS
from tests.tools.plant_faults import FAULTS, ROOT

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
STEPS = [
    (f"{name} {job} {i}", step)
    for name, workflow in WORKFLOWS.items()
    for job, told in workflow["jobs"].items()
    for i, step in enumerate(told["steps"])
]
SCRIPTS = {name: step["run"] for name, step in STEPS if "run" in step}


def test_actions_are_pinned_by_their_commit():
    used = [step["uses"] for _, step in STEPS if "uses" in step]
    assert len(used) > 5 and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) for name in used)
    assert len({*used}) == len({name.partition("@")[0] for name in used})  # one version of each


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_can_be_read_and_name_what_exists(name):
    script = SCRIPTS[name]
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rules = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w./-]+)", script):
        assert re.search(rf"(?m)^{re.escape(target)}( [\w.-]+)*:", rules), target
    assert {*re.findall(r"-m benchmarks (\w+)", script)} <= {*BENCHMARKS}
    assert all((ROOT / path).is_file() for path in re.findall(r"(?<!\S)\.ci/\S+", script))


def test_pull_requests_run_everything_and_each_supported_python():
    jobs = WORKFLOWS["ci"]["jobs"]
    runs = [step.get("run") for step in jobs["check-and-test"]["steps"]]
    assert ".ci/run" in runs
    matrix = jobs["other-pythons"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.10", "3.12", "3.13"]
    assert any("arm" in row["machine"] for row in matrix["include"])
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.line[:40]}")
def test_a_fault_has_its_place_and_its_tests(fault):
    source = (ROOT / "ds_ext" / fault.file).read_text()
    assert source.count(fault.line) == 1 and fault.wrong != fault.line
    files = [word for word in shlex.split(fault.tests) if word.endswith(".py")]
    assert files and all((ROOT / "tests" / file).is_file() for file in files)


# The Makefile chooses the build of torch: from an index of CPU builds where there is no GPU.


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
