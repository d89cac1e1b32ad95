"""Learning rates to begin with: those that were measured, wherever they are shown."""

import json
import re

import pytest

from benchmarks.matrix import summary
from benchmarks.matrix.lines import Lines
from ds_ext import rates
from ds_ext.backward import startup_log
from ds_ext.commands import config
from ds_ext.rules import REGISTRY
from tests.tools.rates import DATA, SAME, UNIT, lines, renewed, start_of
from tests.tools.snippets import ROOT, documents

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


TEXT = """Give `ds_ext.CAME(params, lr={})` or `--learning_rate {}`:

```json
{{"type": "Lion", "params": {{"lr": {}, "param_groups": [{{"match": "lora_", "lr": {}}}]}}}}
```
"""


def test_examples_get_the_rates_to_start_at():
    assert renewed(TEXT.format("2e-5", "5e-4", "0.1", "1e-4")) == TEXT.format(
        "1e-5", "1e-5", "1e-4", "1e-3"
    )
    assert renewed("learning_rate: 5.0e-4  # YAML") == "learning_rate: 1.0e-3  # YAML"
    assert renewed("lr = 0.001") == "lr = 0.001"


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
