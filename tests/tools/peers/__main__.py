"""Runs tests of other projects as they are, and with ds_ext's optimizers in place of torch's.

    python -m tests.tools.peers [SUITE ...]

The tests come from source distributions of the package index, in the versions below, and are run
on CPUs, offline. ``swapped/sitecustomize.py`` puts the optimizers in, also in the processes that a
test starts. The command fails if the outcome of a test is another one than without ds_ext. It
writes the table of docs/tests.md. Archives, reports and logs are in build/peers.
"""

import argparse
import collections
import datetime
import os
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.tools import blocks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "peers"
PAGE = ROOT / "docs/tests.md"
MINUTES = 10  # the limit of a run
HEAD = "suite|as they are|with ds_ext|tests that differ|seconds|date".split("|")


class Suite(NamedTuple):
    """The tests of a project."""

    name: str  # on the command line
    archive: str  # the source distribution
    tests: tuple[str, ...]  # pytest's arguments, in the archive's folder
    beside: tuple[str, ...] = ()  # what the tests import and ds_ext's do not need
    path: tuple[str, ...] = ()  # folders for Python's path


# Tests of timm's torch.optim.Adam and AdamW; its SGD has Nesterov's momentum, which LOMO lacks.
OF_TIMM = " or ".join(f"[{name}{end}" for name in ("adam", "adamw") for end in "]-")
SUITES = (
    Suite(
        "accelerate",
        "accelerate==1.15.0",
        tuple(
            f"tests/test_{name}.py"
            for name in ("optimizer", "scheduler", "state_checkpointing", "accelerator", "cpu")
        ),
        ("parameterized==0.9.0",),
    ),
    Suite(
        "transformers",
        "transformers==5.23.0",
        (str(HERE / "transformers_training.py"),),
        path=(str(BUILD / "transformers-5.23.0" / "tests"),),
    ),
    Suite(
        "peft",
        "peft==0.21.2",
        (
            "tests/test_loraplus.py",
            "tests/test_riemannian_lora.py",
            "tests/test_custom_models.py::TestPeftCustomModel::test_disable_adapters",
            *("-k", "not Adamss"),  # which needs scikit-learn
        ),
        ("diffusers==0.42.1", "parameterized==0.9.0"),
    ),
    Suite(
        "timm",
        "timm==1.0.31",
        ("tests/test_optim.py", "-k", OF_TIMM, "-p", "torchvision_operators"),
        ("torchvision==0.28.0", "expecttest==0.3.0"),
        (str(HERE / "vision"),),
    ),
)

Outcomes = dict[str, str]  # by test: "passed", "skipped", or "failed" and the message


def fetched(suite: Suite) -> Path:
    """Downloads and unpacks a suite's archive, and what it needs, and returns its folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if suite.beside and not (beside := BUILD / f"{suite.name}-beside").exists():
        command = ["install", "--no-deps", "--target", str(beside), *suite.beside]
        subprocess.run([*pip, *command], check=True)
    name, number = suite.archive.split("==")
    folder = BUILD / f"{name}-{number}"
    if not folder.exists():
        command = ["download", "--no-deps", "--no-binary", name, "-d", str(BUILD), suite.archive]
        subprocess.run([*pip, *command], check=True)
        with tarfile.open(BUILD / f"{folder.name}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
        (folder / "tests" / "__init__.py").touch()  # archives lack it; tests import each other
    return folder


def run(suite: Suite, folder: Path, with_ours: bool) -> Outcomes:
    """Runs a suite's tests, and returns their outcomes."""
    swapped = [HERE / "swapped"] if with_ours else []
    path = [*swapped, folder / "src", folder, *suite.path, BUILD / f"{suite.name}-beside", ROOT]
    report = BUILD / f"{suite.name}{'-with-ds_ext' if with_ours else ''}.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "DS_ACCELERATOR": "cpu",
        "TORCH_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}"]
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *suite.tests],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=MINUTES * 60,
        )
    if not report.exists():
        raise SystemExit(f"{suite.name}: pytest has written no report; see {log.name}")
    return outcomes(report)


def outcomes(report: Path) -> Outcomes:
    """Returns the outcome of each test in a report of pytest."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        said = {child.tag: child.get("message", "") for child in case}
        outcome = "skipped" if "skipped" in said else "passed"
        for tag in said.keys() & {"failure", "error"}:
            outcome = f"failed {said[tag]}"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def differing(without: Outcomes, ours: Outcomes) -> list[str]:
    """Returns the tests whose outcome differs, each with its outcome with ds_ext."""
    word = {test: outcome.split()[0] for test, outcome in ours.items()}
    return [
        f"{test}: {ours.get(test, 'missing')}"
        for test, outcome in sorted(without.items())
        if word.get(test) != outcome.split()[0]
    ]


def summary(found: Outcomes) -> str:
    """Returns the numbers of a column."""
    counts = collections.Counter(outcome.split()[0] for outcome in found.values())
    return ", ".join(f"{counts[x]} {x}" for x in ("passed", "failed", "skipped") if counts[x])


def write(row: Sequence[str]) -> None:
    """Puts the row of a suite into the table of the page, in the place of its older one."""
    rows = {row[0].split()[0]: row for row in [*blocks.rows(PAGE, "peers"), row]}
    kept = [rows[suite.name] for suite in SUITES if suite.name in rows]
    blocks.write(PAGE, "peers", blocks.table(HEAD, kept))


def compare(suite: Suite) -> tuple[tuple[str, ...], list[str]]:
    """Runs a suite twice, and returns its row and the tests that differ."""
    start = time.monotonic()
    folder = fetched(suite)
    without, ours = run(suite, folder, False), run(suite, folder, True)
    different = differing(without, ours)
    cells = (suite.archive.replace("==", " "), summary(without), summary(ours))
    cells += (str(len(different)) if different else "none", f"{time.monotonic() - start:.0f}")
    cells += (datetime.date.today().isoformat(),)
    return cells, different


def main() -> None:
    """Compares the suites that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.peers", description=__doc__)
    names = [suite.name for suite in SUITES]
    parser.add_argument("names", nargs="*", metavar="SUITE", help=", ".join(names))
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    failed = False
    for suite in SUITES:
        if not given.names or suite.name in given.names:
            row, different = compare(suite)
            print(row, *different, sep="\n", flush=True)
            write(row)
            failed = failed or bool(different)
    sys.exit(failed)


if __name__ == "__main__":
    main()
