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
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting

ROOT = Path(__file__).parents[2]
FILES = ("test_kernels", "test_kernel_batches", "test_device_nonfinite", "test_apply")
# Those that use kernels, in files with other tests too.
MORE = {
    "test_unseen_rule": "kernels or bad_gradients or advance_once",
    "test_edits": "kernels",
    "test_split": "kernels",
    "test_convolutions": "launch",
}
SANITIZED = "test_a_step_is_that_of_the_ops or test_16_bits"
WORKERS = 8


def rows(on: Setting) -> Rows:
    """Runs the files of tests, all cases; of a rehearsal one test."""
    if on.is_rehearsal:
        yield "pytest", pytest("test_apply", [*tests("test_apply"), "-k", "kernels"])
        return
    parallel = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    yield "pytest", pytest(", ".join(FILES), [*(x for f in FILES for x in tests(f)), *parallel])
    for file, chosen in MORE.items():
        yield "pytest", pytest(file, [*tests(file), "-k", chosen])
    yield "compute-sanitizer", sanitized()


def tests(file: str) -> list[str]:
    return [f"tests/unit/{file}.py"]


def sanitized() -> Row:
    """Runs the steps of some optimizers under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"tests": SANITIZED, "verdict": "compute-sanitizer is not installed"}
    chosen = ["tests/unit/test_kernels.py", "-k", SANITIZED, "-m", "not slow"]
    return pytest(
        SANITIZED,
        chosen,
        [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"],
        # Each tensor in an allocation of its own, whose bounds the tool knows.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def pytest(
    label: str,
    options: Sequence[str],
    under: Sequence[str] = (),
    env: Mapping[str, str] = {},
) -> Row:
    """Runs pytest; returns the numbers of tests, and the first failure."""
    done = subprocess.run(
        [*under, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=ROOT,
        env=os.environ | dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
        "failed": failed[0][:200] if failed else None,
        "verdict": RIGHT if good else WRONG,
    }
