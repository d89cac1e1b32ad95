"""Documents: the code that they quote is the package's, and what refers to them finds them."""

import ast
import json
import re
from pathlib import Path

import pytest

from ds_ext.settings import SETTINGS
from tests.tools import snippets

TEXT = """The rule:

<!-- code: ds_ext/rules/lomo.py LOMO.state_spec -->
```python
{}```

and more.
"""
KEEPS = snippets.source_of("ds_ext/rules/lomo.py", "LOMO.state_spec")


@pytest.mark.parametrize("document", snippets.documents(), ids=lambda path: path.name)
def test_code_that_a_document_quotes_is_the_packages(document):
    text = document.read_text()
    assert snippets.renewed(text) == text, "stale: run `make readme`"
    assert list(snippets.unmarked(text)) == []


@pytest.mark.parametrize("document", snippets.documents(), ids=lambda path: path.name)
def test_examples_can_be_read_by_a_machine(document):
    for kind, code in re.findall(r"(?ms)^```(python|json)\n(.*?)^```$", document.read_text()):
        ast.parse(code) if kind == "python" else json.loads(code)


def _texts() -> list[Path]:
    """Files that may name a document."""
    kinds = ("ds_ext/**/*.py", "tests/**/*.py", "benchmarks/*.py", "examples/*.py")
    kinds += ("configs/**/*.json",)
    own = ("Makefile", "setup.cfg", "pyproject.toml", ".ci/run", "README.md", "docs/**/*.md")
    found = {path for kind in (*kinds, *own) for path in snippets.ROOT.glob(kind)}
    return sorted(found - {Path(__file__)})


def strangers(path: Path) -> list[str]:
    """Names of documents in a file that neither lie beside it nor are paths in the repository.

    Or files of the benchmarks' results, which may be named without their folder.
    """
    folders = (path.parent, snippets.ROOT, snippets.ROOT / "benchmarks/results")
    names = re.findall(r"(?<![\w/.{}*-])(?:\.\./)*[\w/-]+\.md\b", path.read_text())
    return [n for n in names if not any((folder / n).is_file() for folder in folders)]


def test_documents_that_are_named_exist():
    found = {str(path): strangers(path) for path in _texts()}
    assert not {path: names for path, names in found.items() if names}


def test_the_readme_is_for_users_and_short():
    lines = (snippets.ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100


def test_pages_for_users_are_short():
    assert snippets.user_words() < 15_000  # `make docs` shows their number


def test_no_entry_of_the_changelog_is_there_twice():
    for version in (snippets.ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        parts = [part for line in version.splitlines() for part in re.split(r"[.;:] ", line)]
        long = [part for part in parts if len(part) > 60]
        assert [part for part in long if long.count(part) > 1] == []


def test_no_key_that_is_accepted_is_called_refused():
    accepted = {key.split(".")[-1] for key, setting in SETTINGS.items() if setting.no_effect}
    lines = (snippets.ROOT / "docs/settings.md").read_text().splitlines()
    refused = " ".join(line for line in lines if line.endswith("| refused |"))
    assert "nvme" in refused and not accepted & set(re.findall(r"`(\w+)`", refused))


def test_a_stale_block_is_renewed_and_the_rest_left_alone():
    assert snippets.renewed(TEXT.format("stale\n")) == TEXT.format(KEEPS)
    assert snippets.renewed(TEXT.format(KEEPS)) == TEXT.format(KEEPS)


def test_what_the_source_does_not_have_is_an_error():
    with pytest.raises(KeyError, match="Nothing"):
        snippets.renewed(TEXT.replace("LOMO.state_spec", "LOMO.Nothing").format("x\n"))


def test_generated_files_are_what_the_package_makes_now():
    for path, text in snippets.generated():
        assert path.read_text() == text, f"{path} is stale: run `make readme`"


def test_what_is_wrong_is_found(tmp_path):
    """Or the tests above would pass whatever the documents say."""
    path = tmp_path / "file.py"
    path.write_text("# as PLAN.md says, and README.md, docs/algorithms.md, ../up.md; not {x}.md\n")
    assert strangers(path) == ["PLAN.md", "../up.md"]
    assert list(snippets.unmarked(f"```python\n{KEEPS}```\n")) == KEEPS.splitlines()[:1]
    assert list(snippets.unmarked(TEXT.format(KEEPS))) == []
