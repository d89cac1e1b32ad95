"""AdamW on simulated ranks is torch's on whole parameters, to 1e-9 in fp64."""

import functools
import itertools

import torch

import ds_ext
from ds_ext import ops
from ds_ext.ops import formats
from ds_ext.ops.shard import Shard
from ds_ext.rules import all_rules
from tests.common import plain, table
from tests.common.simulated import Formula
from tests.common.table import SHAPES

STEPS = 20
SETTINGS = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
SETTINGS |= {"betas": {"betas": (0.8, 0.95)}, "eps": {"eps": 0.3}}


@functools.cache
def expected(setting, shapes):
    before, steps = table.weights(shapes), table.gradients(STEPS, shapes)
    make = functools.partial(torch.optim.AdamW, **SETTINGS[setting])
    return plain.stepped(make, before, steps)[0]


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


def test_cuts_through_groups_are_found_without_listing_them():
    for size, world, shape in itertools.product((1, 2, 32), (1, 2, 3, 5), ((64, 3), (7,), (0,))):
        shards = [Shard.of_rank(shape, rank, world) for rank in range(world)]
        expected = any(at % size for s in shards for cut in s.cuts for at in cut)
        assert all(formats.splits_groups(s, size) == expected for s in shards)
        if shape != (0,):
            assert formats.splits_groups(ops.Batch(shards[:1] * 2), size) == expected
