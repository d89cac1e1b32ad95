"""Kernels by execution of their compiled IR; ``make ir`` runs all tests of kernels so.

ttsem, which executes it, lies in a folder of its own, made by ``make test-all`` where it can be
installed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import needs

ROOT = Path(__file__).parents[2]
TTSEM = Path(sys.prefix) / "ir"
STEPS = "test_kernels.py::test_a_step_is_that_of_the_ops"
NUMBERS = "test_native.py::test_every_number_is_written_as_the_ops_write_it"
CASES = (f"{STEPS}[lomo-3-fp32-nearest]", f"{STEPS}[lomo-2-fp16-nearest]")
CASES += (f"{NUMBERS}[dtype9-stochastic-kernels-5]",)

pytestmark = [
    needs.nvidia,
    pytest.mark.slow,
    pytest.mark.skipif(not TTSEM.is_dir(), reason="ttsem is installed by `make test-all`"),
]


def test_compiled_kernels_have_the_results_of_the_ops():
    paths = [str(TTSEM), str(ROOT)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.tools.ir"),
            *(f"tests/unit/{case}" for case in CASES),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    launches, unchecked = map(
        int, re.search(r"(\d+) launches executed.* (\d+) of them not", done.stdout).groups()
    )
    assert launches >= len(CASES) and unchecked == 0
