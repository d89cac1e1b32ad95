"""FlashAdamW and Lion on simulated ranks are the papers' algorithms on whole parameters.

The moments of the transcription are rounded as the paper rounds them: codes of 8 bits, and a scale
for 32 elements of the flattened parameter. They are decoded in fp32, as everywhere: a last bit that
differs there would be another code now and then.
"""

import functools

import torch

from ds_ext.ops import companding, formats, schema
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.rules import REGISTRY, all_rules
from tests.common import authors, table
from tests.common.companded import scale_of
from tests.common.simulated import Formula, Ranks, errors, stepped
from tests.common.table import SHAPES

STEPS = 10
WIDE = ((70, 90), (1500,), (7, 31, 9), (64, 32), (33,))  # cuts go through groups of most
ADAMW = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
ADAMW |= {"betas-eps": {"betas": (0.8, 0.95), "eps": 0.3}}
LION = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}, "betas": {"betas": (0.5, 0.8)}}
LION |= {"8 bits": {"nbits": 8}}


RULES = {
    "flashadamw": (all_rules.FlashAdamW, authors.flashadamw, ADAMW),
    "lion": (all_rules.Lion, authors.lion, LION),
}
QUICK = [(("flashadamw", "decay"), 7), (("flashadamw", "betas-eps"), 2), (("lion", "betas"), 3)]
QUICK += [(("flashadamw", "defaults"), 1), (("lion", "8 bits"), 1), (("lion", "8 bits"), 7)]


def expected(rule, setting, shapes):
    _, formula, settings = RULES[rule]
    before, steps = table.weights(shapes), table.gradients(STEPS, shapes)
    return authors.by_formula(formula, before, steps, **settings[setting])


def formula(name):
    rule, _, settings = RULES[name]
    return Formula(
        lambda setting: rule(**settings[setting]),
        functools.partial(expected, name),
        settings,
        (*SHAPES, *WIDE),
        STEPS,
        lambda case: ((name, case[0]), case[1]) in QUICK,
    )


FORMULAS = {name: formula(name) for name in RULES}


def test_rounds_are_for_groups_that_cuts_go_through():
    rule = all_rules.FlashAdamW()
    for shape, world, rounds in (((64, 32), 4, 0), ((64, 32), 3, 1), ((33,), 1, 0), ((33,), 2, 1)):
        assert stepped(rule, (shape,), world, 2)[1] == {rounds}
    assert stepped(all_rules.Lion(), WIDE, 3, 2)[1] == {0}


# The scales.


def test_scales_are_those_of_fp16_where_that_is_normal_and_reach_further():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    scales = companding.scales(bits)
    assert scales.diff().min() > 0 and scales[0] == schema.MIN_SCALE == 2.0**-44
    assert scales[-1] == schema.MAX_SCALE
    assert companding.scale_codes(scales).equal(bits)
    x = torch.rand(10**5, generator=torch.Generator().manual_seed(0)) * 60 - 40
    x = torch.cat([x.exp2(), scales[1:] - scales.diff() / 2]).clamp(2.0**-44, 2.0**20 - 2.0**9)
    found = companding.scales(companding.scale_codes(x))
    assert found.tolist() == [float(scale_of(y)) for y in x]
    normal = (x >= 2.0**-14) & (x <= 65504)
    assert found[normal].equal(x[normal].half().float()) and normal.sum() > 10**4
    assert x[x < 2.0**-26].half().count_nonzero() == 0  # what the published scales lose


def small_steps(scale, steps=30):
    """FlashAdamW and AdamW after gradients of a size, with an eps below all of them."""
    shape, hypers = (64, 50), {"eps": 1e-15, "weight_decay": 0.0}
    before, made = table.weights([shape]), []
    for cls in (all_rules.FlashAdamW, all_rules.AdamW):
        ranks = Ranks(cls(**hypers), before, 1)
        for grads in table.gradients(steps, [shape]):
            ranks.step([g * scale for g in grads])
        made.append(ranks.params)
    return max(errors(*made, before))


def test_gradients_of_1e_9_keep_their_moments(monkeypatch):
    usual = small_steps(1.0)
    assert small_steps(1e-9) < 1.1 * usual < 0.2
    monkeypatch.setattr(companding, "scale_codes", lambda x: x.half().view(torch.int16))
    monkeypatch.setattr(companding, "scales", lambda x: x.view(torch.float16).float())
    assert small_steps(1.0) < 1.1 * usual
    assert small_steps(1e-9) > 0.4  # as published: both moments are 0, each step is a first one


def root_after(steps):
    """A root of v after a gradient of 1 and ``steps`` of nearly 0, over what it should be."""
    ranks = Ranks(all_rules.FlashAdamW(lr=0.0), [torch.zeros(32)], 1)
    for g in [torch.ones(32)] + [torch.full((32,), 1e-6)] * steps:
        ranks.step([g])
    block = next(Shard.whole((32,)).blocks())
    v = companding.SQUARES.opened(ranks.states[0][0]["v"]).block(block)
    return float(v[0, 0, 0].sqrt()) / (0.001 * 0.999**steps) ** 0.5


def test_second_moments_decay(monkeypatch):
    assert 0.6 < root_after(1000) < 1.1
    monkeypatch.setattr(companding, "SCALE_CUT", 16)  # scales in bf16
    monkeypatch.setattr(companding, "SCALE_FIRST", 83 << 7)
    assert root_after(1000) > 1.5  # they stay where they were


def test_values_beyond_all_scales_are_bounded():
    x = torch.tensor([3e7, -3e7, 1e6, 0.0] * 8)
    state = zeros(companding.MOMENT.state_spec(slice(0, 32), 32), x)
    block, run = next(Shard.whole((32,)).blocks()), companding.MOMENT.opened(state)
    run.write_(block, x.view(1, 1, 32))
    assert run.block(block).view(-1)[:2].tolist() == [schema.MAX_SCALE, -schema.MAX_SCALE]
    state = zeros(companding.SQUARES.state_spec(slice(0, 32), 32), x)
    run = companding.SQUARES.opened(state)
    run.write_(block, x.square().view(1, 1, 32))
    assert run.block(block).isfinite().all()


# What is kept.


def test_only_runs_of_whole_groups_are_batched():
    entries = REGISTRY
    for world, whole in ((2, True), (3, False)):
        shard = Shard.of_rank((64, 32), 0, world)
        assert formats.splits_groups(shard, 32) != whole
        assert entries["flashadamw"].batches(all_rules.FlashAdamW(), shard) == whole
        assert entries["lion"].batches(all_rules.Lion(nbits=8), shard) == whole
        assert entries["lion"].batches(all_rules.Lion(), shard)
