"""Each fault of `tests/tools/faults.txt` can be planted in today's code, and its tests exist."""

import shlex

import pytest

from tests.tools.plant_faults import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.line[:40]}")
def test_a_fault_has_its_place_and_its_tests(fault):
    source = (ROOT / "ds_ext" / fault.file).read_text()
    assert source.count(fault.line) == 1 and fault.wrong != fault.line
    files = [word for word in shlex.split(fault.tests) if word.endswith(".py")]
    assert files and all((ROOT / "tests" / file).is_file() for file in files)
