"""Whether the tests still find faults: each of faults.txt is planted in a copy of the tree.

    python -m tests.tools.plant_faults            # all, against the tests that should see each
    python -m tests.tools.plant_faults came zero  # those with one of the words in place or line
    python -m tests.tools.plant_faults --all      # all, against the whole of `make test`

Only tests of `make test` are run, those that are not marked slow. The tests named beside a fault
must pass without it; if one of them then fails, the fault is seen. Ends with status 1 if a fault
is not seen. A fault whose line has been changed since is an error: plant another in its place.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 900  # seconds that a run of tests takes at most: a hang is seen too


class Fault(NamedTuple):
    """One line of a file, what it is turned into, and the tests that should see it."""

    file: str  # below ds_ext
    line: str
    wrong: str
    tests: str  # what pytest is given: files below tests, and -k


def read(text: str) -> list[Fault]:
    """The faults of a text like faults.txt."""
    found = []
    for head, *lines in (x.splitlines() for x in re.split(r"^@ ", text, flags=re.M)[1:]):
        file, _, tests = head.partition(" ")
        old, new = ("\n".join(x[1:] for x in lines if x[:1] == sign) for sign in "-+")
        found.append(Fault(file, old, new, tests))
    return found


FAULTS = read((ROOT / "tests/tools/faults.txt").read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--green", action="store_true", help="`make test` passes: do not check it")
    parser.add_argument("--all", action="store_true", help="against the whole of `make test`")
    options = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not options.words or any(w in " ".join(fault) for w in options.words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        passes: dict[str, bool] = {}
        missed = 0
        for fault in chosen:
            tests = "" if options.all else fault.tests
            if tests not in passes:
                passes[tests] = options.green or run(tree, tests) == ""
            began = time.monotonic()
            if not passes[tests]:
                told = "THE TESTS FAIL WITHOUT IT"
            else:
                by = planted(tree, fault, tests)
                told = f"seen by {by}" if by else "NOT SEEN"
            missed += not told.startswith("seen")
            seconds = time.monotonic() - began
            print(f"{fault.file}: {fault.wrong.strip()}\n{seconds:5.0f} s  {told}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are seen.")
    sys.exit(missed > 0)


def copied(folder: Path) -> Path:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def planted(tree: Path, fault: Fault, tests: str) -> str:
    """The test that fails with a fault in the tree, which is taken out again; "" if none does."""
    path = tree / "ds_ext" / fault.file
    text = path.read_text()
    assert text.count(fault.line) == 1, f"{fault.file} has {text.count(fault.line)} × {fault.line}"
    path.write_text(text.replace(fault.line, fault.wrong))
    try:
        return run(tree, tests)
    finally:
        path.write_text(text)


def run(tree: Path, tests: str) -> str:
    """The first test, of those that are not slow, that fails in a tree; "" if none does."""
    places = [f"tests/{t}" if t.endswith(".py") else t for t in shlex.split(tests)] or ["tests"]
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-m", "not slow", *places]
    # ttsem, which executes the IR of kernels for the faults that name its plugin
    paths = [str(tree), str(Path(sys.prefix) / "ir")] if "tests.tools.ir" in tests else [str(tree)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"a hang of {LIMIT} s"
    if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
    if not failed and done.returncode > 0:  # a plugin or a package is missing
        raise RuntimeError(f"pytest did not run: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return failed[1] if failed else f"pytest's exit status {done.returncode}"


if __name__ == "__main__":
    main()
