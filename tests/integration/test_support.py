"""The support matrix, docs/support.md: what tests say of themselves, and what the pages say."""

import os

import pytest

from ds_ext.rules import REGISTRY
from tests.tools import blocks, support
from tests.tools.support import cells


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


def test_a_row_names_stages_and_optimizers():
    stages = {name: {"1", "2", "3", "FSDP2"} for name in support.OPTIMIZERS[1:]}
    stages["CAME"] = {"1", "2", "FSDP2"}
    shown = [("a", ("HSDP", s, name)) for name, own in stages.items() for s in own]
    shown += [("a", ("several hosts", "plain", name)) for name in ("LAMB", "CAME")]
    table = support.matrix(shown)
    assert "| HSDP | ZeRO-1–3; FSDP2 | all except LOMO* |" in table
    assert "| several hosts | plain PyTorch | CAME, LAMB |" in table
    assert "|  | ✓ except LOMO |  | ✓ except LOMO |" in support.by_stage(shown)


SAID = [((["HSDP"],), {"stage": [None, 3], "optimizer": "came"}, ["plain CAME", "3 CAME"])]
SAID += [(("HSDP",), {"stage": lambda stage: stage - 1, "optimizer": "rule"}, ["1 LAMB"])]


@pytest.mark.parametrize("args, told, expected", SAID)
def test_a_mark_takes_values_from_the_parameters(args, told, expected):
    found = cells(args, told, {"stage": 2, "rule": "lamb"})
    assert found == [("HSDP", *cell.split(" ")) for cell in expected]


@pytest.mark.parametrize("feature, stage, rule", [("hsdp", 1, "CAME"), ("HSDP", 4, "CAME")])
def test_a_mark_that_means_nothing_is_an_error(feature, stage, rule):
    with pytest.raises((KeyError, ValueError)):
        cells((feature,), {"stage": stage, "optimizer": rule}, {})
