"""A fault: a line of the package that is wrong on purpose, and the tests that should see it."""

from typing import NamedTuple

ZERO = "distributed/test_zero.py -k "
FSDP2 = "integration/test_fsdp2_trainer.py -k "


class Fault(NamedTuple):
    """One line of a file, what it is turned into, and the tests that should see it."""

    file: str  # below ds_ext
    line: str
    wrong: str
    tests: str  # what pytest is given: files below tests, and -k
