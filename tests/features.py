"""How many cases each feature of the support matrix has, and each file: `make test`, and in all.

Usage: python -m tests.features docs/tests-by-feature.md

Writes the columns of today into the tables of the page; what stood there before stays.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import FEATURES, cells


class Counting:
    """A plugin that counts what is collected."""

    def __init__(self) -> None:
        self.quick: Counter[str] = Counter()
        self.all: Counter[str] = Counter()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        marks = item.iter_markers("supports")
        shown = {cell[0] for mark in marks for cell in cells(mark.args, mark.kwargs, params)}
        names = {*shown, item.nodeid.split("::")[0].removeprefix("tests/")}
        self.all.update(names)
        if item.get_closest_marker("slow") is None:
            self.quick.update(names)


def render(text: str, counted: Counting) -> str:
    """The page with today's numbers; rows of files that are new are added, at the end."""
    known = set()

    def row(match: re.Match[str]) -> str:
        name, before = match["name"].strip(), match["before"].strip()
        known.add(name)
        return f"| {name} | {before} | {counted.all[name]} | {counted.quick[name]} |"

    pattern = r"^\| (?P<name>[^|]+) \| (?P<before>[\d ]*) \| \d* ?\| \d* ?\|$"
    text = re.sub(pattern, row, text, flags=re.M)
    new = [name for name in sorted(counted.all) if name not in known and name not in FEATURES]
    return text + "".join(
        f"| {name} |  | {counted.all[name]} | {counted.quick[name]} |\n" for name in new
    )


def main() -> None:
    page, counted = Path(sys.argv[1]), Counting()
    pytest.main(["--collect-only", "-qq", "tests"], plugins=[counted])
    page.write_text(render(page.read_text(), counted))


if __name__ == "__main__":
    main()
