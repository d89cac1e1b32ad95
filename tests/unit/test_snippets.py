"""Code in README.md and docs/ is what the package says."""

import ast
import json
import re

import pytest

from tests import snippets

TEXT = """The rule:

<!-- code: ds_ext/rules/lomo.py LOMO.keeps -->
```python
{}```

and more.
"""
KEEPS = "def keeps(self, shard):\n    return {}\n"


@pytest.mark.parametrize("document", snippets.documents(), ids=lambda path: path.name)
def test_code_that_a_document_quotes_is_the_packages(document):
    text = document.read_text()
    assert snippets.renewed(text) == text, "stale: run `make readme`"
    assert list(snippets.unmarked(text)) == []


@pytest.mark.parametrize("document", snippets.documents(), ids=lambda path: path.name)
def test_examples_can_be_read_by_a_machine(document):
    for kind, code in re.findall(r"(?ms)^```(python|json)\n(.*?)^```$", document.read_text()):
        ast.parse(code) if kind == "python" else json.loads(code)


def test_a_rule_is_quoted():
    assert "<!-- code: ds_ext/rules/" in snippets.documents()[0].read_text()


def test_a_stale_block_is_renewed_and_the_rest_left_alone():
    assert snippets.renewed(TEXT.format("stale\n")) == TEXT.format(KEEPS)
    assert snippets.renewed(TEXT.format(KEEPS)) == TEXT.format(KEEPS)


def test_a_block_without_a_mark_is_found():
    assert list(snippets.unmarked(f"```python\n{KEEPS}```\n")) == ["def keeps(self, shard):"]
    assert list(snippets.unmarked(TEXT.format(KEEPS))) == []


def test_what_the_source_does_not_have_is_an_error():
    with pytest.raises(KeyError, match="Nothing"):
        snippets.renewed(TEXT.replace("LOMO.keeps", "LOMO.Nothing").format("x\n"))
