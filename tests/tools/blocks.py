"""Blocks of a Markdown page that a command writes, each between two comments.

The comments are ``<!-- NAME: the command -->`` and ``<!-- end of NAME -->``.
"""

import re
from collections.abc import Sequence
from pathlib import Path


def read(page: Path, name: str) -> str:
    return _find(page.read_text(), name)[2]


def rows(page: Path, name: str) -> list[list[str]]:
    """Returns the cells of the table in a block, without its head."""
    return [line.strip("| ").split(" | ") for line in read(page, name).splitlines()[2:]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def write(page: Path, name: str, made: str) -> None:
    text = page.read_text()
    found = _find(text, name)
    page.write_text(f"{text[: found.start(2)]}{made}\n{text[found.end(2) :]}")


def _find(text: str, name: str) -> re.Match[str]:
    found = re.search(rf"(?ms)^(<!-- {name}: [^\n]* -->\n)(.*?)^<!-- end of {name} -->$", text)
    assert found is not None, f"the page has no block {name!r}"
    return found
