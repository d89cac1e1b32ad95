"""AdamW on simulated ranks is torch's on whole parameters, to 1e-9 in fp64."""

import functools
import itertools

import pytest
import torch

import ds_ext
from ds_ext import ops
from ds_ext.ops import formats
from ds_ext.ops.shard import Shard
from ds_ext.rules import all_rules
from tests.common import plain, table
from tests.common.choose import params
from tests.common.simulated import BROKEN, EXACT, Formula, dropping, errors, stepped
from tests.common.table import SHAPES

STEPS = 20
SETTINGS = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
SETTINGS |= {"betas": {"betas": (0.8, 0.95)}, "eps": {"eps": 0.3}}
WIDE = ((70, 90), (1500,), (7, 31, 9), (1025,), (40,))  # of more than one 8-bit block, but one
EIGHT = {"lr": 0.01, "nbits": 8, "min_8bit_size": 1025}


def by_torch(before, steps, **hypers):
    """The parameters after the gradients ``steps`` by torch's AdamW."""
    return plain.stepped(lambda params: torch.optim.AdamW(params, **hypers), before, steps)[0]


@functools.cache
def expected(setting, shapes):
    return by_torch(table.weights(shapes), table.gradients(STEPS, shapes), **SETTINGS[setting])


FORMULA = Formula(
    lambda setting: all_rules.AdamW(**SETTINGS[setting]),
    expected,
    SETTINGS,
    SHAPES,
    STEPS,
    lambda case: case[1] == 3 or case[0] == "decay",
)


def test_defaults_are_those_of_torch():
    (theirs,) = torch.optim.AdamW([torch.zeros(1)]).param_groups
    (own,) = ds_ext.AdamW([torch.zeros(1)]).param_groups
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert own[name] == theirs[name]


@pytest.mark.parametrize("world", params([2, 3, 7, 64], [3, 7]))
def test_8_bits_are_rounded_alike_on_any_number_of_ranks(world):
    pytest.importorskip("bitsandbytes")
    rule, before = all_rules.AdamW(**EIGHT), table.weights(WIDE)
    whole, none = stepped(rule, WIDE, 1, STEPS)
    sharded, one = stepped(rule, WIDE, world, STEPS)
    assert none == {0} and one == {1}  # a cut goes through blocks
    assert max(errors(sharded.params, whole.params, before)) <= 1e-6
    broken, _ = stepped(rule, WIDE, world, STEPS, simulate=dropping(0))
    assert max(errors(broken.params, whole.params, before)) > BROKEN


def test_8_bits_are_near_32():
    pytest.importorskip("bitsandbytes")
    small, _ = stepped(all_rules.AdamW(**EIGHT), WIDE, 3, STEPS)
    large, _ = stepped(all_rules.AdamW(lr=0.01), WIDE, 3, STEPS)
    found = errors(small.params, large.params, table.weights(WIDE))
    assert 1e-4 < max(found) < 0.2
    assert found[-1] <= EXACT  # 40 moments stay fp32


def test_cuts_through_groups_are_found_without_listing_them():
    for size, world, shape in itertools.product((1, 2, 32), (1, 2, 3, 5), ((64, 3), (7,), (0,))):
        shards = [Shard.of_rank(shape, rank, world) for rank in range(world)]
        expected = any(at % size for s in shards for cut in s.cuts for at in cut)
        assert all(formats.splits_groups(s, size) == expected for s in shards)
        if shape != (0,):
            assert formats.splits_groups(ops.Batch(shards[:1] * 2), size) == expected
