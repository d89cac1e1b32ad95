"""Every rule on simulated ranks is its authors' code or its paper on whole parameters, in fp64.

The measure is the error relative to the total update of each parameter. The same measure is
applied to runs that are broken on purpose, to show that it can fail.
"""

import itertools

import pytest

from ds_ext.ops import block_sizes
from ds_ext.ops.shard import Shard
from tests.common import table
from tests.common.choose import params
from tests.common.simulated import BROKEN, EXACT, errors
from tests.common.table import WORLDS
from tests.unit import (
    test_adamw,
    test_apollo,
    test_flashadamw,
    test_galore,
    test_lamb,
    test_muon,
    test_normalized,
    test_rules,
)

FORMULAS = {
    **test_rules.FORMULAS,
    **test_normalized.FORMULAS,
    **test_flashadamw.FORMULAS,
    "adamw": test_adamw.FORMULA,
    "lamb": test_lamb.FORMULA,
    "galore": test_galore.FORMULA,
    "apollo": test_apollo.FORMULA,
    "muon": test_muon.FORMULA,
}
ALL = [
    (name, setting, world)
    for name, formula in FORMULAS.items()
    for setting in formula.settings
    for world in WORLDS
]


def cases(key):
    """The cases of this kind of all rules."""
    return [(name, *case) for name, formula in FORMULAS.items() for case in getattr(formula, key)]


@pytest.mark.parametrize(
    "name, setting, world", params(ALL, lambda case: FORMULAS[case[0]].quick(case[1:]))
)
def test_sharded_equals_the_formula(name, setting, world):
    assert FORMULAS[name].error(setting, world) <= EXACT


@pytest.mark.parametrize("name", FORMULAS)
def test_the_settings_matter(name):
    formula = FORMULAS[name]
    results = [formula.expected(setting, formula.shapes) for setting in formula.settings]
    for a, b in itertools.combinations(results, 2):
        assert max(errors(a, b, table.weights(formula.shapes))) > BROKEN


@pytest.mark.parametrize("name, setting, world, shapes, shift", cases("misplaced"))
def test_a_run_in_the_wrong_place_is_seen(name, setting, world, shapes, shift):
    assert FORMULAS[name].error(setting, world, shapes, shift=shift) > BROKEN


@pytest.mark.parametrize("limit", [1, 4, 40])
@pytest.mark.parametrize("name, setting, shapes", cases("blocks"))
def test_blocks_of_any_size_give_the_same(name, setting, shapes, limit, monkeypatch):
    def forget():  # shards that are kept know the limit
        Shard.whole.cache_clear()
        Shard.of_rank.cache_clear()

    monkeypatch.setattr("ds_ext.ops.shard.BLOCK", limit)
    monkeypatch.setattr(block_sizes, "product_limit", lambda device: limit)
    forget()
    try:
        assert FORMULAS[name].error(setting, 3, shapes) <= EXACT
    finally:
        forget()
