"""Workflows: actions are pinned, scripts can be read, and what they name exists."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[2]
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
