"""Documents: the code and the rates that they quote are the package's, and what they name exists.

The support matrix: what tests say of themselves, and what the pages say.
"""

import ast
import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.matrix import summary
from benchmarks.matrix.lines import Lines
from ds_ext import rates
from ds_ext.backward import startup_log
from ds_ext.commands import config
from ds_ext.rules import REGISTRY
from ds_ext.settings import SETTINGS
from tests.tools import blocks, snippets, support
from tests.tools.rates import DATA, SAME, UNIT, lines, start_of
from tests.tools.snippets import ROOT, documents

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


def strangers(path: Path) -> list[str]:
    """Names of documents in a file that neither lie beside it nor are paths in the repository.

    Or files of the benchmarks' results, which may be named without their folder.
    """
    folders = (path.parent, snippets.ROOT, snippets.ROOT / "benchmarks/results")
    names = re.findall(r"(?<![\w/.{}*-])(?:\.\./)*[\w/-]+\.md\b", path.read_text())
    return [n for n in names if not any((folder / n).is_file() for folder in folders)]


def test_documents_that_are_named_exist():
    kinds = ("ds_ext/**/*.py", "tests/**/*.py", "benchmarks/*.py", "examples/*.py")
    kinds += ("configs/**/*.json",)
    own = ("Makefile", "setup.cfg", "pyproject.toml", ".ci/run", "README.md", "docs/**/*.md")
    files = {path for kind in (*kinds, *own) for path in snippets.ROOT.glob(kind)}
    found = {str(path): strangers(path) for path in files - {Path(__file__)}}
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
    assert snippets.renewed(TEXT.format("stale\n")) == TEXT.format(KEEPS)


def test_the_pages_say_what_the_marks_say(request):
    """If this fails: `make matrix`."""
    collected = request.config.pluginmanager.get_plugin("support")
    every = {str(path.relative_to(support.ROOT)) for path in support.ROOT.glob("tests/*/test_*.py")}
    if collected.files != every or "DS_EXT_TEST_PACKAGES" in os.environ:
        pytest.skip("some tests were not collected")
    assert blocks.read(support.PAGE, "support") == support.matrix(collected.shown) + "\n"
    assert support.BY_STAGE.read_text() == support.by_stage(collected.shown)


def test_the_table_names_every_registered_optimizer():
    assert set(support.OPTIMIZERS) == {entry.rule.__name__ for entry in REGISTRY.values()}


MOST = 0.07  # of the gain, as docs/choosing.md says


def test_every_optimizer_has_a_rate():
    assert rates.RATES.keys() == {*REGISTRY, rates.LORA}


@pytest.mark.parametrize("name", [*rates.RATES, UNIT])
def test_a_start_is_the_lowest_rate_that_gives_up_little(name):
    shares = summary.given_up(lines(), DATA, SAME.get(name, name))
    near = [lr for lr, share in shares.items() if share <= min(shares.values()) + rates.TOLERANCE]
    assert min(near) == start_of(SAME.get(name, name))
    assert shares[min(near)] < (0.25 if name == "lomo" else MOST)


# Rates that others' programs have, of which pages tell.
THEIRS = {"HF Trainer": {5e-5}, "TRL": {2e-5, 1e-6}, "LLaMA-Factory": {1e-5}}
RECORDS = ("performance", "performance-method")  # what was run, at which rate
DEFAULTS = "algorithms"  # of each class
LEAST = startup_log.LEAST_RATE
NUMBER = re.compile(r"(?<![\w.])\d(?:\.\d+)?e-[1-6]\b")


def known(name):
    """All rates of the table that an optimizer has, and its default."""
    rate = rates.RATES[name]
    published = rate.published.lr if rate.published else ()
    default = REGISTRY[name].rule().lr if name in REGISTRY else None
    said = NUMBER.findall(rate.published.run) if rate.published else ()
    return {rate.start, *rate.others, *published, default, *map(float, said)} - {None}


def strange(text):
    """Rates of a text's lines that no optimizer has that the line names, or none at all."""
    text = re.sub(r"(?ms)^<!-- (\w+): .*?^<!-- end of \1 -->$", "", text)
    text = text.partition("## What was measured")[0]
    for line in text.splitlines():
        if not re.search(r"rate\b|rates\b|\blr\b", line):
            continue
        named = {n for n in rates.RATES if re.search(rf"\b{n}(?![a-z])", line, re.I)}
        there = set().union(*(known(n) for n in named or rates.RATES), {LEAST})
        there |= set().union(*(lrs for program, lrs in THEIRS.items() if program in line))
        yield from (x for x in NUMBER.findall(line) if float(x) not in there)


@pytest.mark.parametrize("page", documents(), ids=lambda path: path.name)
def test_a_page_names_no_rate_that_is_not_in_the_table(page):
    if page.stem not in (*RECORDS, DEFAULTS):
        assert list(strange(page.read_text())) == []


def test_the_page_of_algorithms_has_the_defaults():
    rows = re.findall(
        r"(?m)^\| ([\w-]+) \(\[.*\| lr (\de-\d)", (ROOT / f"docs/{DEFAULTS}.md").read_text()
    )
    names = {name.replace("-", "").lower(): float(lr) for name, lr in rows}
    assert len(names) > 8 and all(REGISTRY[name].rule().lr == lr for name, lr in names.items())


def test_a_rate_that_is_not_in_the_table_is_found():
    assert list(strange("AdaLomo's rate is 5e-4, or 3e-5; LAMB's lr 0.1")) == ["3e-5"]
    assert list(strange("an error of 3e-5 of the update")) == []


def test_docstrings_and_messages_have_the_rates_to_start_at():
    starts = {rate.start for rate in rates.RATES.values()}
    for path in sorted((ROOT / "ds_ext").rglob("*.py")):
        quoted = re.findall(r"""["`( ]lr"? ?[=:] ?(\d[\d.]*e-\d)""", path.read_text())
        # check.py: HF Trainer's default
        assert path.name == "check.py" or {*map(float, quoted)} <= starts, path


@pytest.mark.parametrize("name", [*REGISTRY, "deepspeed_adamw"])
def test_the_demo_begins_at_the_rate_of_the_table(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune

    path = str(ROOT / "examples/deepspeed_adamw.json") if "_" in name else name
    config = json.loads(finetune.config_file(path).read_text())
    assert finetune.rate_of(config) == rates.RATES[name.removeprefix("deepspeed_")].start


def test_what_is_given_up_is_a_share_of_the_gain(tmp_path):
    runs = Lines(tmp_path, {})
    for data, lr, loss in [("a", 1.0, 2.0), ("a", 0.1, 3.0), ("b", 1.0, 1.0), ("b", 0.1, 0.5)]:
        line = {"data": data, "candidate": "x", "lr": lr, "seed": 0, "loss": loss, "before": 4.5}
        runs.add(line)
    runs.add(line | {"lr": 0.01, "loss": 0.75})  # on one data set alone
    assert summary.given_up(runs, ["a", "b", "c"], "x") == {0.1: 0.4, 1.0: 0.125}


def test_the_advice_is_a_rate_and_its_half_and_twice():
    found = rates.advice("AdaLomo").split()
    assert found[:2] == ["start", "at"]
    start, half, twice = (float(found[i].rstrip(",")) for i in (2, 4, 6))
    assert start == rates.RATES["adalomo"].start and (half, twice) == (start / 2, start * 2)
    assert rates.advice("SGD") == "" and " with " not in rates.advice("AdaLomo")
    assert '"adjust_lr_fn": "match_rms_adamw"' in rates.advice("Muon")
    assert '"relative_step": false' in rates.advice("Adafactor")
    assert rates.RATES["adafactor"].start == rates.RATES["adalomo"].start  # whose steps it takes


@pytest.mark.parametrize("name", REGISTRY)
def test_a_config_with_numbers_has_the_rate(name):
    rate = rates.RATES[name]
    for numbers, lr in ((True, rate.start), (False, "auto")):
        params = config.make(name, 3, numbers)["optimizer"]["params"]
        assert params.items() >= {"lr": lr, **rate.params}.items()
