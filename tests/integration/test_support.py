"""The support matrix, docs/support.md: what tests say of themselves, and how it is held to."""

import json
from pathlib import Path

import pytest

from ds_ext.rules import REGISTRY
from tests.tools import blocks, support, support_table
from tests.tools.support import cells

ROOT = Path(__file__).parents[2]


def test_the_document_has_the_table_of_the_tests_that_ran():
    found = json.loads((ROOT / "tests" / "tools" / "support.json").read_text())
    assert blocks.read(ROOT / "docs/support.md", "support") == support_table.render(found) + "\n"
    assert (ROOT / "docs/tests-by-feature.md").read_text() == support_table.by_feature(found)
    files = {name for names in found["files"].values() for name in names}
    assert all((ROOT / name).exists() for name in files)


def test_the_table_names_every_registered_optimizer():
    assert set(support.OPTIMIZERS) == {entry.rule.__name__ for entry in REGISTRY.values()}


def test_a_row_names_stages_and_optimizers():
    some = dict.fromkeys(support.OPTIMIZERS[1:], "passed")
    few = {"CAME": "passed", "LAMB": "passed"}
    cells = {
        "MiCS": {"1": some, "2": some, "3": some | {"CAME": "skipped"}, "FSDP2": some},
        "ZenFlow": {"plain": few | {"LOMO": "failed"}},
    }
    table = support_table.render({"date": "then", "full": True, "cells": cells})
    assert "| MiCS | ZeRO-1–3; FSDP2 | all except LOMO* |" in table
    assert "| ZenFlow | plain PyTorch | CAME, LAMB, ✗ LOMO |" in table


SAID = [((["MiCS"],), {"stage": [None, 3], "optimizer": "came"}, ["plain CAME", "3 CAME"])]
SAID += [(("MiCS",), {"stage": lambda stage: stage - 1, "optimizer": "rule"}, ["1 LAMB"])]
SAID += [(("MiCS",), {"refused": "zero_optimization.x"}, ["refused zero_optimization.x"])]


@pytest.mark.parametrize("args, told, expected", SAID)
def test_a_mark_takes_values_from_the_parameters(args, told, expected):
    found = cells(args, told, {"stage": 2, "rule": "lamb"})
    assert found == [("MiCS", *cell.split(" ")) for cell in expected]


@pytest.mark.parametrize("feature, stage, rule", [("MICS", 1, "CAME"), ("MiCS", 4, "CAME")])
def test_a_mark_that_means_nothing_is_an_error(feature, stage, rule):
    with pytest.raises((KeyError, ValueError)):
        cells((feature,), {"stage": stage, "optimizer": rule}, {})


def test_what_the_document_claims_and_a_run_did_not_show_is_told():
    outcomes = {"0": "passed", "1": "failed", "2": "skipped"}
    ran = {
        f"tests/test_it.py::test_one[{stage}]": {
            "outcome": outcome,
            "cells": [["MiCS", stage, "CAME"]],
        }
        for stage, outcome in outcomes.items()
    }
    ran["tests/test_it.py::test_other"] = ran["tests/test_it.py::test_one[0]"] | {
        "cells": [["MiCS", "1", "CAME"]]  # one failure outweighs all that passed
    }
    shown = support.summary({"full": True, "tests": ran})
    assert shown["cells"]["MiCS"] == {stage: {"CAME": how} for stage, how in outcomes.items()}
    claimed = {"cells": {"MiCS": {s: {"CAME": "passed"} for s in ("0", "1", "2", "plain")}}}
    said, is_wrong = support.compare(claimed, shown)
    assert is_wrong and said[:3] == [
        "docs/support.md claims MiCS, stage 1, CAME: failed in this run",
        "docs/support.md claims MiCS, stage 2, CAME: skipped in this run",
        "docs/support.md claims MiCS, stage plain, CAME: not tested in this run",
    ]
