"""Kernels by execution of their compiled IR; ``make ir`` runs all tests of kernels so.

ttsem, which executes it, lies in a folder of its own, made by ``make test-all`` where it can be
installed.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.common import apart, needs

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
    paths = os.pathsep.join([str(TTSEM), str(apart.ROOT)])
    cases = (f"tests/unit/{case}" for case in CASES)
    options = ("-m", "pytest", "-q", "-p", "tests.tools.ir")
    done = apart.python(*options, *cases, timeout=600, PYTHONPATH=paths)
    counted = re.search(r"(\d+) launches executed.* (\d+) of them not", done.stdout)
    launches, unchecked = map(int, counted.groups())
    assert launches >= len(CASES) and unchecked == 0
