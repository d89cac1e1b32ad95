"""Every rule on simulated ranks is its authors' code or its paper on whole parameters, in fp64.

The measure is the error relative to the total update of each parameter. The same measure is
applied to runs that are broken on purpose, to show that it can fail.
"""

import itertools

import pytest

from ds_ext.ops import block_sizes
from ds_ext.ops.executors import unbatched
from ds_ext.ops.shard import WIDEST, Shard
from ds_ext.rules.all_rules import (
    APOLLO,
    CAME,
    LAMB,
    LOMO,
    Adafactor,
    AdaLomo,
    FlashAdamW,
    GaLoreAdamW,
    Lion,
    Muon,
)
from tests.common import table
from tests.common.choose import params, spread
from tests.common.simulated import BROKEN, EXACT, Ranks, errors
from tests.common.table import SHAPES, VECTORS, WORLDS
from tests.unit import (
    test_apollo,
    test_flashadamw,
    test_galore,
    test_muon,
    test_normalized,
    test_rules,
)

FORMULAS = {
    **test_rules.FORMULAS,
    **test_normalized.FORMULAS,
    **test_flashadamw.FORMULAS,
    "galore": test_galore.FORMULA,
    "apollo": test_apollo.FORMULA,
    "muon": test_muon.FORMULA,
}
# Each setting on two or three ranks, and each formula on seven. That a rule is the same on any
# other number, and on one: test_every_rule.py.
FEW = [
    (name, *case)
    for name, formula in FORMULAS.items()
    for case in spread(formula.settings, [(2,), (3,)][: len(formula.settings)])
]
ALL = FEW + [(name, [*formula.settings][-1], 7) for name, formula in FORMULAS.items()]


def cases(key):
    """The cases of this kind of all rules."""
    return [(name, *case) for name, formula in FORMULAS.items() for case in getattr(formula, key)]


@pytest.mark.parametrize("name, setting, world", params(ALL, FEW))
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


@pytest.mark.parametrize("limit", params([1, 4, 40], [4]))
@pytest.mark.parametrize("name, setting, shapes", cases("blocks"))
def test_blocks_of_any_size_give_the_same(name, setting, shapes, limit, monkeypatch):
    def forget():  # shards and passes that are kept know the limit
        unbatched.forget_tables()
        Shard.whole.cache_clear()
        Shard.of_rank.cache_clear()

    monkeypatch.setattr("ds_ext.ops.shard.BLOCK", limit)
    monkeypatch.setattr("ds_ext.ops.shard.WIDEST", limit)
    monkeypatch.setattr(block_sizes, "product_limit", lambda device: limit)
    forget()
    try:
        assert FORMULAS[name].error(setting, 3, shapes) <= EXACT
    finally:
        forget()


# The rounds of each step: a rule, the shape of a parameter or those of a bucket, a number of ranks.
ROUNDS = [(LAMB(), (13, 29), world, [1]) for world in WORLDS]
ROUNDS += [(APOLLO(rank=4, update_proj_gap=2), (29, 13), world, [2] * 4) for world in WORLDS]
GALORE = GaLoreAdamW(rank=4, update_proj_gap=3)
# Where the basis is renewed: a slice of the gradient, the basis; then R; left, the update.
ROUNDS += [(GALORE, (29, 13), world, [3, 1, 1, 3]) for world in WORLDS]
ROUNDS += [(GALORE, (13, 29), world, [4, 2, 2, 4]) for world in WORLDS]
ROUNDS += [(GALORE, shape, 3, [0] * 4) for shape in ((5,), (4, 3, 5))]
ROUNDS += [(Muon(), shape, 1, [0, 0]) for shape in ((29, 13), (13, 29), (16, 16))]
ROUNDS += [(Muon(), shape, 2, [2, 2]) for shape in ((13, 29), (16, 16), (30, 14))]
ROUNDS += [(Muon(), (29, 13), 2, [2, 2]), (Muon(), (1, 1), 16, [0, 0])]
ROUNDS += [(Muon(), shape, 16, [2, 2]) for shape in ((7, 1), (1, 7))]
# Groups of 32 elements that a cut goes through take one.
ROUNDS += [(FlashAdamW(), (64, 32), 4, [0]), (FlashAdamW(), (64, 32), 3, [1])]
ROUNDS += [(FlashAdamW(), (33,), 1, [0]), (FlashAdamW(), (33,), 2, [1]), (Lion(), (33,), 3, [0])]
# Rows of a matrix that a cut goes through, and vectors, take more than whole rows.
ROUNDS += [
    (test_normalized.rule_of(case), shape, 3, [rounds])
    for case, (_, cut, whole) in test_normalized.SETTINGS.items()
    for shape, rounds in (((6, 5), whole), ((5, 6), cut), ((7,), cut))
]


# Rows of up to 2**14 columns are whole; wider ones take the rounds of rows that a cut goes through.
ROUNDS += [(AdaLomo(), (2, WIDEST + more), 1, [1 + more]) for more in (0, 1)]
# Where a rank holds a part of a row, where rows are whole, and of vectors.
OF_BUCKETS = {LOMO: (0, 0, 0), AdaLomo: (2, 1, 1), Adafactor: (2, 1, 1), CAME: (3, 2, 1)}
for world in (1, 3):
    whole = [(3 * world, 5), (world, 7), (2, world, 5)]  # 2 ranks or more hold a matrix each
    for rule, (cut, by_rows, of_vectors) in OF_BUCKETS.items():
        first = cut if world > 1 else by_rows
        ROUNDS += [(rule(), (13, 29), world, [first] * 3), (rule(), SHAPES, world, [first] * 3)]
        ROUNDS += [(rule(), shapes, world, [by_rows] * 3) for shapes in (whole, [*whole, *VECTORS])]
        ROUNDS += [(rule(), VECTORS, world, [of_vectors] * 3)]


@pytest.mark.parametrize("rule, shape, world, rounds", ROUNDS, ids=str)
def test_a_step_takes_few_rounds(rule, shape, world, rounds):
    shapes = shape if isinstance(shape[0], tuple) else [shape]
    ranks = Ranks(rule, table.weights(shapes), world)
    assert [ranks.step(grads) for grads in table.gradients(len(rounds), shapes)] == rounds
