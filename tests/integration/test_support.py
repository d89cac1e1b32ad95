"""The support matrix, docs/support.md: what tests say of themselves, and how it is held to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ext.rules import REGISTRY
from tests.tools import blocks, support, support_table
from tests.tools.support import cells

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- support: make matrix -->", "<!-- end of support -->"


def test_the_document_has_the_table_of_the_tests_that_ran():
    found = json.loads((ROOT / "tests" / "tools" / "support.json").read_text())
    assert blocks.read(ROOT / "docs/support.md", "support") == support_table.render(found) + "\n"
    assert (ROOT / "docs/tests-by-feature.md").read_text() == support_table.by_feature(found)


def test_the_table_names_every_registered_optimizer():
    assert set(support.OPTIMIZERS) == {entry.rule.__name__ for entry in REGISTRY.values()}


def test_a_row_names_stages_and_optimizers():
    some = dict.fromkeys(support.OPTIMIZERS[1:], "passed")
    few = {"CAME": "passed", "LAMB": "passed"}
    cells = {
        "MiCS": {"1": some, "2": some, "3": some, "FSDP2": some},
        "DeepCompile": {"0": few, "3": few | {"LOMO": "passed"}},
        "ZenFlow": {"plain": few | {"LOMO": "failed"}},
    }
    table = support_table.render({"date": "then", "full": True, "cells": cells})
    assert "| MiCS | ZeRO-1–3; FSDP2 | all except LOMO |" in table
    assert "| DeepCompile | ZeRO-0, 3 | LOMO, CAME, LAMB* |" in table
    assert "| ZenFlow | plain PyTorch | CAME, LAMB, ✗ LOMO |" in table


FARED = [
    (dict.fromkeys(support.OPTIMIZERS, "passed"), "✓"),
    (dict.fromkeys(support.OPTIMIZERS[1:], "passed"), f"✓ except {support.OPTIMIZERS[0]}"),
    (dict.fromkeys(support.OPTIMIZERS, "passed") | {"CAME": "skipped"}, "✓ except CAME"),
    ({"CAME": "passed", "LAMB": "failed"}, "CAME, ✗ LAMB"),
    ({}, ""),
]


@pytest.mark.parametrize("row, cell", FARED)
def test_a_cell_names_the_fewer_of_those_that_passed_and_the_others(row, cell):
    assert support_table._cell(row) == cell


SAID = [
    ((["MiCS"],), {"stage": [None, 3], "optimizer": "came"}, ["plain CAME", "3 CAME"]),
    (("MiCS",), {"stage": "stage", "optimizer": "rule"}, ["2 LAMB"]),
    (("MiCS",), {"stage": lambda stage: stage - 1, "optimizer": ["LOMO"]}, ["1 LOMO"]),
    ((lambda stage: [],), {"stage": 1, "optimizer": "CAME"}, []),
    (("MiCS",), {"refused": "zero_optimization.x"}, ["refused zero_optimization.x"]),
]


@pytest.mark.parametrize("args, told, expected", SAID)
def test_a_mark_takes_values_from_the_parameters(args, told, expected):
    found = cells(args, told, {"stage": 2, "rule": "lamb"})
    assert found == [("MiCS", *cell.split(" ")) for cell in expected]


ILL = [
    (("MICS",), {"stage": 1, "optimizer": "CAME"}),
    (("MiCS",), {"stage": 4, "optimizer": "CAME"}),
    (("MiCS",), {"stage": 1, "optimizer": "Adam"}),
    (("MiCS",), {"stage": 1}),
]


@pytest.mark.parametrize("args, told", ILL)
def test_a_mark_that_means_nothing_is_an_error(args, told):
    with pytest.raises((KeyError, ValueError)):
        cells(args, told, {})


SUITE = """
import pytest

@pytest.mark.supports("MiCS", stage="stage", optimizer="CAME")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one(stage):
    assert stage != 1
    if stage == 2:
        pytest.skip("on purpose, to see how it is reported")

@pytest.mark.supports("MiCS", stage=3, optimizer="CAME")
@pytest.mark.parametrize("n", range(4))
def test_other(n):
    pass

@pytest.fixture
def broken():
    raise OSError

@pytest.mark.supports("MiCS", stage=None, optimizer="LAMB")
def test_never_run(broken):
    pass

@pytest.mark.supports("ZenFlow", refused="zero_optimization.zenflow")
def test_refusal():
    pass
"""
CONFTEST = """
from ds_ext.rules import REGISTRY
from tests.tools import support

def pytest_configure(config):
    config.pluginmanager.register(support.Collector(config))
"""
PROJECT = '[tool.pytest.ini_options]\nmarkers = ["supports"]\ntestpaths = ["tests"]\n'


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository of four tests whose document claims things, and a full run of it by xdist."""
    root = tmp_path_factory.mktemp("project")
    (root / "tests" / "tools").mkdir(parents=True)
    (root / "tests" / "test_it.py").write_text(SUITE)
    (root / "tests" / "conftest.py").write_text(CONFTEST)
    (root / "pyproject.toml").write_text(PROJECT)
    claimed = {s: {"CAME": "passed"} for s in ("0", "1", "2", "3", "plain")}
    found = {"date": "then", "full": True, "cells": {"MiCS": claimed}, "files": {}}
    (root / "tests" / "tools" / "support.json").write_text(json.dumps(found))
    (root / "docs").mkdir()
    (root / "docs/support.md").write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    return root, pytest_in(root, "-n2"), ran(root)


def pytest_in(root, *args):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist.plugin", *args, "-p", "no:cacheprovider"],
        cwd=root,
        env={k: v for k, v in os.environ.items() if "PYTEST" not in k}
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # others take time
        capture_output=True,
        text=True,
        timeout=120,
    )


def ran(root):
    return json.loads((root / "build" / "support.json").read_text())


@pytest.mark.slow
def test_outcomes_are_gathered_from_all_processes(project):
    _, done, found = project
    assert found["full"], done.stdout + done.stderr
    got = support.summary(found)
    assert got["cells"]["MiCS"] == {
        "0": {"CAME": "passed"},
        "1": {"CAME": "failed"},
        "2": {"CAME": "skipped"},
        "3": {"CAME": "passed"},
        "plain": {"LAMB": "failed"},
    }
    assert got["cells"]["ZenFlow"] == {"refused": {"zero_optimization.zenflow": "passed"}}
    assert got["files"]["MiCS"] == ["tests/test_it.py"]


@pytest.mark.slow
def test_a_full_run_tells_what_the_document_claims_and_it_did_not_show(project):
    _, done, _ = project
    told = [line for line in done.stdout.splitlines() if line.startswith("docs/support.md claims")]
    assert told == [
        "docs/support.md claims MiCS, stage 1, CAME: failed in this run",
        "docs/support.md claims MiCS, stage 2, CAME: skipped in this run",
        "docs/support.md claims MiCS, stage plain, CAME: not tested in this run",
    ]


@pytest.mark.slow
@pytest.mark.slow
def test_a_claim_without_its_test_fails_a_full_run_and_no_part_of_one(project):
    root, *_ = project
    passing = ["--deselect", "tests/test_it.py::test_one[1]", "--deselect"]
    part = pytest_in(root, *passing, "tests/test_it.py::test_never_run")
    assert part.returncode == 0 and "docs/support.md claims" not in part.stdout, part.stdout
    assert not ran(root)["full"] and len(ran(root)["tests"]) == 10  # added to what was there
    (root / "tests" / "test_it.py").write_text(
        SUITE.replace("assert stage != 1", "pass").replace("raise OSError", "pass")
    )
    whole = pytest_in(root)
    assert whole.returncode == 1 and " failed" not in whole.stdout, whole.stdout
    assert "docs/support.md claims MiCS, stage plain, CAME: not tested in this run" in whole.stdout


@pytest.mark.slow
def test_the_table_is_written_between_its_marks(project):
    root, *_ = project
    command = [sys.executable, "-m", "tests.tools.support_table", str(root / "docs/support.md")]
    for _ in range(2):  # again: the same
        subprocess.run(command, cwd=ROOT, check=True)
        text = (root / "docs/support.md").read_text()
        assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n")
    found = json.loads((root / "tests" / "tools" / "support.json").read_text())
    assert support_table.render(found) in text
    assert "CAME" in text
    assert "[it](../tests/test_it.py) |" in (root / "docs/tests-by-feature.md").read_text()
