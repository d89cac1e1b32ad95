"""The tests of kernels, by pytest in processes of their own.

The tests choose their device: a GPU's memory where there is one, else the CPU and Triton's
interpreter. compute-sanitizer then repeats some steps, if it is installed, and reports accesses out
of bounds.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting

ROOT = Path(__file__).parents[2]
FILES = ("kernels", "devices")
FILES += ("int8", "native", "statistics", "update_stats", "unseen_rule", "edits", "shard")
# Those that use kernels, by words in their names. The other tests of these files do not need a GPU.
CHOSEN = "kernel or bad_gradient or host_reads or no_limits or advance_once or launch"
SANITIZED = "test_a_step_is_that_of_the_ops"
WORKERS = 14
SHORT = ("-q", "--tb=short", "-p", "no:cacheprovider")
PATIENCE = 90  # seconds for compute-sanitizer


def rows(on: Setting) -> Rows:
    """Runs the tests of kernels, all cases; of a rehearsal, those of one file."""
    if on.is_rehearsal:
        chosen = [*tests(["kernels"]), "-k", "a_convolution or a_launch"]
        yield "pytest", pytest("test_kernels", chosen)
        return
    parallel = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    yield "pytest", pytest("of kernels", [*tests(FILES), "-k", CHOSEN, *parallel])
    yield "compute-sanitizer", sanitized()


def tests(names: Iterable[str]) -> list[str]:
    """Paths of files of tests."""
    return [f"tests/unit/test_{name}.py" for name in names]


def sanitized() -> Row:
    """Runs the steps of some optimizers under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"tests": SANITIZED, "verdict": "compute-sanitizer is not installed"}
    chosen = ["tests/unit/test_kernels.py", "-k", SANITIZED, "-m", "not slow"]
    under = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    # Each tensor in an allocation of its own, whose bounds the tool knows.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        return pytest(SANITIZED, chosen, under, env, PATIENCE)
    except subprocess.TimeoutExpired:
        return {"tests": SANITIZED, "verdict": f"not ended in {PATIENCE} s"}


def pytest(
    label: str,
    options: Sequence[str],
    under: Sequence[str] = (),
    env: Mapping[str, str] = {},
    limit: float | None = None,
) -> Row:
    """Runs pytest; returns the numbers of tests, and the first failure."""
    done = subprocess.run(
        [*under, sys.executable, "-m", "pytest", *SHORT, *options],
        cwd=ROOT,
        env=os.environ | dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    sys.stdout.write(done.stdout[-20_000:])
    lines = done.stdout.splitlines()
    failed = [line for line in lines if re.match(r"(FAILED|ERROR|========= (?!COMPUTE))", line)]
    passed = re.findall(r"(\d+) passed", done.stdout)
    skipped = re.findall(r"(\d+) skipped", done.stdout)
    good = done.returncode == 0 and passed
    return {
        "tests": label,
        "passed": int(passed[-1]) if passed else 0,
        "skipped": int(skipped[-1]) if skipped else 0,
        "failed": len(failed),
        "first": failed[0][:200] if failed else None,
        "verdict": RIGHT if good else WRONG,
    }
