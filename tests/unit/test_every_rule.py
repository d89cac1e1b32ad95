"""What every registered rule has to hold on simulated ranks, whichever its formula.

The rules are those of the registry: one that is new is among them without a line here. What is
sharded is held against the same rule on whole parameters; what a rule computes is held against its
authors' code or its paper in a file of its own.
"""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch

from ds_ext.ops.state import leaves
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules.base import key_of
from tests.common import hypers, newcomer, table
from tests.common.choose import params, spread
from tests.common.simulated import BROKEN, EXACT, Ranks, dropping, shapes_of, sharded_error
from tests.common.table import WORLDS, gradients, weights
from tests.distributed import matrices, resuming, zero
from tests.plant_faults import copied

MANY = [n for n in WORLDS if n > 1]
ON_RANKS = list(itertools.product(OPTIMIZERS, MANY))


def at(state, path):
    for key in path:
        state = state[key]
    return state


def check_on_ranks(name, world):
    """Sharded is whole, and what is the same on all ranks has the same bits on them."""
    error, whole, ranks = sharded_error(name, world)
    assert error <= EXACT
    for k, shards in enumerate(zip(*ranks.shards, strict=True)):
        for path, part in leaves(ranks.rule.state_spec(shards[0])):
            if part.is_shared:
                first, *others = [at(states[k], path) for states in ranks.states]
                assert all(torch.equal(first, other) for other in others), path
    assert not any(map(torch.equal, whole.params, weights(shapes_of(name))))


@pytest.mark.parametrize("name, world", params(ON_RANKS, spread(OPTIMIZERS, [(3,), (2,)])))
def test_sharded_equals_whole(name, world):
    check_on_ranks(name, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_more_ranks_than_elements(name):
    shapes = ((5,), (1, 7), (13, 5), (5, 13))
    assert sharded_error(name, table.MANY, 2, shapes=shapes)[0] <= EXACT


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_missing_reduction_is_seen(name):
    rule = OPTIMIZERS[name].hypers(**hypers.SIMULATED[name])
    before, (grads,) = weights(shapes_of(name)), gradients(1, shapes_of(name))
    taken = Ranks(rule, before, 2).step(grads)
    assert taken == Ranks(rule, before, 2).step(grads, dropping(None))
    if taken:  # at least in the first round of a step
        assert sharded_error(name, 2, 3, simulate=dropping(0))[0] > BROKEN


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_becomes_nan_where_gradients_are_zero(name):
    rule = OPTIMIZERS[name].hypers(**hypers.SIMULATED[name] | {"weight_decay": 0.0})
    before = weights(shapes_of(name))
    ranks = Ranks(rule, before, 3)
    nothing = [torch.zeros_like(p) for p in before]
    for _ in range(2):
        ranks.step(nothing)
    assert all(map(torch.equal, ranks.params, before))
    for grads in gradients(2, shapes_of(name)):
        ranks.step(grads)
        ranks.step(nothing)
    assert all(p.isfinite().all() for p in ranks.params)


@pytest.fixture
def joined():
    """A rule that is new, in the registry."""
    newcomer.enter()
    yield newcomer.NAME
    newcomer.leave()


def test_a_new_rule_has_rows_in_the_tables(joined):
    assert hypers.SIMULATED[joined] == {"lr": 0.02, "weight_decay": 0.1}
    assert hypers.TRAINED[joined] == {"lr": 0.01} and hypers.NEEDED[joined] == {"lr": 1e-3}
    assert joined in {*hypers.SIMULATED} & {*zero.HYPERS} & {*OPTIMIZERS}
    assert hypers.changed(hypers.TRAINED, newcomer={"lr": 3.0})[joined] == {"lr": 3.0}


def test_a_new_rule_is_held_to_what_every_rule_is(joined):
    for world in MANY:
        check_on_ranks(joined, world)
    test_a_missing_reduction_is_seen(joined)
    test_nothing_becomes_nan_where_gradients_are_zero(joined)


def test_a_new_rule_that_is_wrong_on_ranks_is_seen():
    newcomer.enter(is_broken=True)
    try:
        assert sharded_error(newcomer.NAME, 3, 3)[0] > BROKEN
        with pytest.raises(AssertionError):
            check_on_ranks(newcomer.NAME, 3)
    finally:
        newcomer.leave()


FILES = {  # of tests that a new rule takes part in, and its least number of cases there
    "unit/test_every_rule.py": 6,
    "unit/test_optimizer.py": 5,
    "unit/test_precision.py": 24,
    "unit/test_split.py": 20,
    "unit/test_stacks.py": 6,
    "unit/test_fuse.py": 10,
    "distributed/test_zero.py": 10,
}
JOINS = "\n\nfrom tests.common import newcomer\n\nnewcomer.enter({})\n"  # in rules/__init__.py


def said_of(tree, *args):
    """What pytest says of the new rule's cases in a copy of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-k", newcomer.NAME, "-p", "no:cacheprovider", *args],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


@pytest.mark.slow
def test_a_new_rule_of_the_repository_is_collected_and_run(tmp_path):
    tree = copied(tmp_path)
    registered = tree / "ds_ext" / "rules" / "__init__.py"
    before = registered.read_text()
    registered.write_text(before + JOINS.format(""))
    listed = said_of(tree, "--collect-only", "-q", *(f"tests/{file}" for file in FILES))
    for file, least in FILES.items():
        cases = re.findall(rf"^tests/{file}::.*\[.*newcomer.*\]$", listed, re.M)
        assert len(cases) >= least, (file, len(cases))
    # what is simulated, and two stages on real ranks
    chosen = (
        "-q",
        "-m",
        "not slow",
        "-k",
        "newcomer",
        "tests/unit/test_every_rule.py",
        "tests/distributed/test_zero.py",
    )
    right = said_of(tree, *chosen)
    assert " passed" in right and " failed" not in right and " error" not in right, right[-3000:]
    registered.write_text(before + JOINS.format("is_broken=True"))
    failed = set(re.findall(r"^FAILED tests/(\S+?)::", said_of(tree, *chosen), re.M))
    assert failed == {"unit/test_every_rule.py", "distributed/test_zero.py"}


def test_the_kinds_of_runs_that_are_resumed_are_of_every_rule():
    kinds = {name for name, _ in resuming.KINDS.values()} | {*map(key_of, matrices.TYPES)}
    assert kinds == set(OPTIMIZERS)
