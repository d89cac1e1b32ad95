"""Runs some tests with the oldest and newest versions, and writes the table of docs/install.md.

    python -m tests.tools.versions [NAME==VERSION ...] [--only WORDS] [--torch-index URL]

Each version of torch, DeepSpeed, transformers and accelerate gets a folder under build/versions.
The folder comes first on the path of the tests. All other packages are those of this environment.

- Oldest: the given versions. A package that is not given has the lowest version that pyproject.toml
  allows. Given packages that are none of the four are installed beside the oldest transformers.
- Newest: those of the package index.
- torch comes from an index of CPU builds, because the default builds bring gigabytes of CUDA.
  Without such an index the command leaves torch's results as they are.
"""

import argparse
import datetime
import functools
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tools import blocks

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "versions"
PAGE = ROOT / "docs/install.md"
NAMES = {n.lower(): n for n in ("torch", "DeepSpeed", "transformers", "accelerate")}
NOT_RUN = ("not run", "–")
TESTS = {  # ZeRO 0 to 3, a resumed run and HF Trainer, compared with the authors' code
    "tests/distributed/test_zero.py": "equals_the_authors and (adalomo or came)",
    "tests/distributed/test_resume.py": "gone_on_from and not galore",
    "tests/integration/test_trainer.py": "trainer_equals and adalomo and not lora or would_drop",
}
FEATURES = TESTS | {  # the others that depend on torch; in torch 2.6 FSDP2 needs a GPU
    "tests/unit/test_chunk_loss.py": "loss_and_gradients",
    "tests/unit/test_int8.py": "bf16_model_rounded or goes_on_with_the_same",
    "tests/unit/test_native.py": "equals_the_torch_ops and adalomo or every_number",
    "tests/unit/test_chunked_batch.py": "gradients_are_those_of_the_whole",
    "tests/unit/test_training_loops.py": "clipping_by_torch",
}


def run_with(folder: Path | None, *args: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python with the packages of ``folder`` first on its path, for 15 minutes at most."""
    own = {"PYTHONPATH": str(ROOT)}
    if folder:
        own = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "DS_EXT_TEST_PACKAGES": str(folder)}
        if (folder / "torch").is_dir():
            own["TORCH_EXTENSIONS_DIR"] = f"{folder}-extensions"
    command = [sys.executable, *args]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=900
    )


@functools.cache
def quick_tests(folder: Path | None, of_torch: bool) -> "subprocess.CompletedProcess[str]":
    """Runs ``TESTS``, or ``FEATURES`` if ``of_torch``, with the packages of ``folder``."""
    tests = FEATURES if of_torch else TESTS
    words = " or ".join(f"({words})" for words in tests.values() if words)
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", words)
    return run_with(folder, "-m", "pytest", *options, *tests)


def available(name: str, index: list[str]) -> list[str]:
    """Returns the versions of a package that the index has, the newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, *index]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", done.stdout)
    if not found or "Could not fetch" in done.stderr or "Retrying" in done.stderr:
        raise SystemExit(f"The package index does not list {name}: {done.stderr.strip()[-300:]}")
    return found[1].split(", ")


def lowest(name: str, index: list[str]) -> str:
    """Returns the lowest version of a package that pyproject.toml allows and the index has."""
    (allowed,) = re.findall(rf'"({name}>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    specifier = Requirement(allowed).specifier
    return min(specifier.filter(available(name, index)), key=Version)


def install(folder: Path, wanted: list[str], index: list[str]) -> None:
    """Installs packages into a folder, and those that they need in another version than here's."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    env = os.environ | {"DS_BUILD_OPS": "0"}
    while wanted:
        subprocess.run([*pip, "--target", str(folder), *index, *wanted], check=True, env=env)
        own = list(distributions(path=[str(folder)]))
        has = {canonicalize_name(d.name): d.version for d in [*distributions(), *own]}
        needed = [Requirement(text) for package in own for text in package.requires or ()]
        wanted = [
            f"{need.name}{need.specifier}"
            for need in needed
            if not need.marker or need.marker.evaluate({"extra": ""})
            if (name := canonicalize_name(need.name)) not in NAMES
            if name not in has or not need.specifier.contains(has[name], prereleases=True)
        ]


def result(name: str, wanted: list[str], index: list[str]) -> str:
    """Returns what the tests say about a version, which is installed unless it is this one."""
    here = {canonicalize_name(d.name): d.version for d in distributions()}
    folder = None
    if wanted != [f"{name}=={here[name].split('+')[0]}"]:
        folder = BUILD / wanted[0].replace("==", "-")
        if not folder.exists():
            install(folder, wanted, index)
    done = quick_tests(folder, name == "torch")
    (BUILD / f"{wanted[0]}.log").write_text(done.stdout + done.stderr)
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.search(r"\d+ passed", summary)
    if done.returncode or not passed or "skipped" in summary:
        return f"failed: {summary.strip('= ')}"
    return passed[0]


def write(rows: dict[str, tuple[str, str]]) -> None:
    """Puts rows (version: result, date) into the table. A row "not run" replaces none."""
    had = {version: (result, date) for version, result, date in blocks.rows(PAGE, "versions")}
    rows = had | {k: row for k, row in rows.items() if row != NOT_RUN or k not in had}

    def place(version: str) -> tuple[int, Version]:
        name, number = version.split()
        return [*NAMES.values()].index(name), Version(number)

    lines = [(version, *rows[version]) for version in sorted(rows, key=place)]
    blocks.write(PAGE, "versions", blocks.table(("version", "tests", "date"), lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.versions", description=__doc__)
    parser.add_argument("oldest", nargs="*", metavar="NAME==VERSION", help="the oldest versions")
    parser.add_argument("--only", default="", help="versions whose name has these words")
    parser.add_argument("--torch-index", default="", help="an index of CPU builds of torch")
    given = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    pins = {pin.split("==")[0]: pin for pin in given.oldest}
    beside = [pin for name, pin in pins.items() if name not in NAMES]
    ok = True
    for name, spelling in NAMES.items():
        of_torch = name == "torch" and given.torch_index
        index = ["--index-url", given.torch_index] if of_torch else []
        old = pins.get(name) or f"{name}=={lowest(name, index)}"
        new = f"{name}=={available(name, index)[0].split('+')[0]}"
        for wanted in ([old, *(beside if name == "transformers" else [])], [new]):
            version = wanted[0].replace(f"{name}==", f"{spelling} ")
            if given.only in version:
                row = NOT_RUN
                if name != "torch" or of_torch:
                    row = (result(name, wanted, index), datetime.date.today().isoformat())
                print(version, *row, sep=" | ", flush=True)
                write({version: row})
                ok = ok and not row[0].startswith("failed")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
