"""Fused matrices: each section is stepped as a matrix of its own, on any number of ranks."""

import functools
import re

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.checkpoint import resharding
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Box, Shard, TensorParallelSplit
from ds_ext.optimizer import OPTIMIZERS, param_checks
from ds_ext.rules import REGISTRY
from tests.common import low_rank, models, optimizer_ranks, plain, table
from tests.common.choose import crossed, params
from tests.common.hypers import SIMULATED
from tests.common.simulated import EXACT, errors

STEPS = 5
SHAPE = (12, 8)
# The keys, and how torch cuts a matrix [12, 8] into its sections (written without ds_ext).
FORMS = {
    "qkv": ({"split": [6, 4, 2]}, lambda x: x.split([6, 4, 2])),
    "gate and up": ({"split": [6, 6]}, lambda x: x.split(6)),
    "heads": ({"heads": 4}, lambda x: x.split(3)),
}
RULES = [name for name, entry in REGISTRY.items() if entry.has_sections]


def stepped(name, before, steps, world, hypers, first=None):
    """Simulated ranks after steps of one parameter."""
    ranks = optimizer_ranks.of_rule(name, [before], world, hypers, first)
    optimizer_ranks.step(ranks, *([g] for g in steps))
    return ranks


def whole(ranks):
    (found,) = optimizer_ranks.whole(ranks)
    return found


def apart(name, hypers, sections, before, steps):
    """What the optimizer of separate parameters makes of the sections of a matrix."""
    make = functools.partial(OPTIMIZERS[name], **hypers)
    (found,) = plain.in_parts(make, sections, [before], [[g] for g in steps])
    return found


def data(shape=SHAPE, dtype=torch.float64):
    (before,), steps = table.weights([shape], dtype), table.gradients(STEPS, [shape], dtype)
    return before, [g for (g,) in steps]


@pytest.mark.parametrize("form, name", crossed(FORMS, zip(RULES)))
def test_every_rule_steps_a_section_as_a_parameter(name, form):
    keys, sections = FORMS[form]
    before, steps = data()
    expected = apart(name, SIMULATED[name], sections, before, steps)
    for world in (1, 2, 3, 7):
        found = whole(stepped(name, before, steps, world, SIMULATED[name] | keys))
        assert max(errors(sections(found), expected, sections(before))) <= EXACT


@pytest.mark.parametrize("form", params(FORMS, ["qkv"]))
def test_a_stack_of_experts_has_the_sections_in_each_expert(form):
    keys, sections = FORMS[form]
    before, steps = data((3, *SHAPE))
    hypers = {"lr": 0.02, "weight_decay": 0.1}
    make = functools.partial(torch.optim.Muon, **hypers)
    with low_rank.in_dtype(torch.float64):
        expected = plain.in_parts(make, sections, before, steps)
    for world in (1, 2, 7):
        found = whole(stepped("muon", before, steps, world, hypers | keys, 0))
        for got, wanted, old in zip(found, expected, before, strict=True):
            assert max(errors(sections(got), wanted, sections(old))) <= EXACT


@pytest.mark.parametrize("weight_update", ["stochastic", "nearest", "master", "master24"])
@pytest.mark.parametrize("form", ["qkv", "heads"])
def test_16_bit_weights_have_the_same_bits_on_any_number_of_ranks(form, weight_update):
    """SCALE's update by rows of few elements is exact: gradients are small whole numbers."""
    keys, sections = FORMS[form]
    before, steps = data(dtype=torch.float32)
    before, steps = before.bfloat16(), [(g % 5).round().bfloat16() for g in steps]
    hypers = {"lr": 2**-9, "momentum": 0.5, "weight_update": weight_update}
    (one,), *others = (stepped("scale", before, steps, n, hypers | keys) for n in (1, 2, 3, 7))
    for ranks in others:
        assert errors([whole(ranks)], [whole([one])], [before])[0] <= 1e-2
        same = (whole(ranks) == whole([one])).float().mean()
        assert same >= 0.99  # sums of a row's squares differ in their last bits
    in_fp32 = stepped("scale", before.float(), [g.float() for g in steps], 2, hypers | keys)
    close = {"master": 0.02, "master24": 0.02}.get(weight_update, 0.5)
    (new,) = one.weights
    assert errors([new.view(SHAPE)], [whole(in_fp32)], [before.float()])[0] <= close


def test_random_bits_of_sections_are_drawn_once_per_element():
    keys = []
    for form in FORMS:
        p = torch.ones(12 * 8, dtype=torch.bfloat16).view(SHAPE)
        hypers = {"lr": 1.0, "alpha": 2**-9, "iterations": 1, "weight_update": "stochastic"}
        ranks = stepped("sinkgd", p, [torch.ones_like(p)], 1, hypers | FORMS[form][0])
        keys.append(whole(ranks))
    # 1 - 2^-9 is a quarter between 1 - 2^-8 and 1... rounded up by as many random bits everywhere
    ups = [int((k == 1).sum()) for k in keys]
    assert len({*ups}) == 1 and 0 < ups[0] < 12 * 8


@pytest.mark.parametrize("form", ["qkv", "heads"])
def test_a_checkpoint_does_not_depend_on_sections_or_ranks(form):
    keys, _ = FORMS[form]
    before, steps = data()
    hypers = {"lr": 0.02, "weight_decay": 0.1} | keys
    straight = stepped("muon", before, steps, 2, hypers)
    first = stepped("muon", before, steps[:2], 3, hypers)
    saved = resharding.save(first[0].optimizer, first[0].owned)
    assert [*saved["state"]["0"]] == ["step", "m"]
    again = optimizer_ranks.of_rule("muon", [torch.zeros_like(before)], 2, {"lr": 0.1} | keys)
    optimizer_ranks.load(again, first)
    optimizer_ranks.step(again, *([g] for g in steps[2:]))
    assert errors([whole(again)], [whole(straight)], [before])[0] <= EXACT


def test_measured_updates_are_those_of_the_whole_matrix():
    before, steps = data()
    for form in ("qkv", "heads"):
        ranks = optimizer_ranks.of_rule("muon", [before], 2, {"lr": 0.02} | FORMS[form][0])
        for rank in ranks:
            rank.optimizer.measure_updates()
        with torch.no_grad():
            buckets = [rank.optimizer.begin(rank.updates(steps[:1])) for rank in ranks]
            lockstep.simulate([bucket.generators for bucket in buckets])
            for bucket in buckets:
                bucket.end()
        sums = sum(rank.optimizer.update_stats.sums() for rank in ranks)[0]
        after = whole(ranks)
        expected = (after - before).square().sum(), after.square().sum(), 96.0
        assert torch.allclose(sums, torch.tensor(expected, dtype=torch.float64))


class Attention(nn.Module):
    """A fused layer with a bias, and others."""

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(8, 12), nn.Linear(8, 8, bias=False)
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 5)


def rules_of(model, **params):
    optimizer = ds_ext.Muon.for_model(model, **params)
    return optimizer, {n: optimizer.rule_of(p) for n, p in model.named_parameters()}


def test_an_entry_splits_the_matrix_and_leaves_its_bias_to_adamw():
    model = Attention()
    entries = [{"match": "qkv_proj", "split": [6, 4, 2]}, {"match": "o_proj", "heads": 2}]
    _, rules = rules_of(model, lr=0.02, param_groups=entries)
    assert rules["qkv_proj.weight"].split == (6, 4, 2) and rules["o_proj.weight"].heads == 2
    assert type(rules["qkv_proj.bias"]).__name__ == "AdamW"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("form", ["qkv", "heads"])
@pytest.mark.parametrize("way", ["plain", "fused"])
def test_a_step_of_fp32_weights_splits_them(name, form, way):
    """SinkGD's and SCALE's whole matrices are stepped in batches, and checked by their sums."""
    keys, sections = FORMS[form]
    before, steps = data(dtype=torch.float32)
    hypers = SIMULATED[name] | ({"momentum": 0.0} if name == "scale" else {})
    expected = apart(name, hypers, sections, before, steps)
    model = models.Given([before.clone()])
    optimizer = OPTIMIZERS[name](model.parameters(), **hypers | keys)
    if way == "fused":
        ds_ext.fuse_into_backward(model, optimizer)
    for g in [*steps[:2], torch.full_like(before, torch.nan), *steps[2:]]:
        if way == "fused" or g.isfinite().all():
            model([g]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert max(errors(sections(model.weights[0]), expected, sections(before))) <= 1e-5


# What a config says wrong: the entry, and the message.
WRONG = {
    "sizes": (
        {"match": "qkv_proj", "split": [6, 4]},
        "param_groups[0].split is [6, 4], but qkv_proj.weight has the shape [12, 8]: the sizes "
        "must add up to its 12 rows, but add up to 10.",
    ),
    "sizes and heads": (
        {"match": "qkv_proj", "split": [6, 4, 2], "heads": 3},
        'the shape [12, 8]: remove it or "heads", which is 3.',
    ),
    "heads": (
        {"match": "o_proj", "heads": 3},
        "param_groups[0].heads is 3, but o_proj.weight has the shape [8, 8]: heads must divide "
        "its 8 rows.",
    ),
    "columns": (
        {"match": "o_proj", "split": [4, 4], "split_dim": 1},
        "param_groups[0].split_dim was removed in ds_ext 1.1: remove it",
    ),
    "type": ({"match": "o_proj", "split": [4.5, 3.5]}, "allowed: a list of whole numbers > 0"),
    "none": ({"match": "o_proj", "split": []}, "allowed: a list of whole numbers > 0"),
    "auto": (
        {"match": "qkv_proj", "split": "auto"},
        "param_groups[0].split is 'auto'; allowed: a list of whole numbers > 0 or null. \"auto\" "
        "was removed in ds_ext 1.1: list the rows of each part",
    ),
    "no matrix": (
        {"match": "norm", "split": [4, 4]},
        "param_groups[0].split: 'norm' matches no parameter",
    ),
    "AdamW's": ({"match": "norm", "momentum": 0.5}, "[0].momentum: 'norm' matches no parameter"),
    "not Muon's": ({"match": "o_proj", "type": "AdamW", "heads": 2}, "unknown key"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_sizes_are_refused_by_name(kind):
    entry, message = WRONG[kind]
    with pytest.raises(ValueError, match=re.escape(message)):
        rules_of(Attention(), param_groups=[entry])


@pytest.mark.parametrize("kind, hypers", [("Muon", {"nbits": 8}), ("Muon", {"beta2": 0.9})])
def test_states_that_cannot_be_divided_are_refused(kind, hypers):
    param = nn.Parameter(torch.ones(12, 8))
    param.grad = torch.ones_like(param)
    optimizer = getattr(ds_ext, kind)([param], split=[6, 6], **hypers)
    with pytest.raises(
        ValueError, match=rf"split is \[6, 6\], .* of {kind} does not have one number"
    ):
        optimizer.step()
    assert torch.equal(param, torch.ones(12, 8))


def test_boxes_of_tensor_parallelism_are_refused():
    """Each of two ranks has half of the columns."""
    optimizer = ds_ext.Muon([nn.Parameter(torch.ones(12, 8))], split=[6, 6])
    (param,) = optimizer.params()
    boxes = TensorParallelSplit(((Box(0, 12, 0, 4),), (Box(0, 12, 4, 4),)))
    with pytest.raises(ValueError, match="split and heads need ranks that hold whole rows of"):
        param_checks.refuse_shape(optimizer, param, Shard.of_split((12, 8), boxes, 0, 0))
    param_checks.refuse_shape(optimizer, param, Shard.of_rank((12, 8), 0, 2))


def test_wrong_sizes_of_groups_made_by_hand_are_refused_before_a_weight_changes():
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(12, 8))]
    optimizer = ds_ext.Muon([{"params": params[:1]}, {"params": params[1:], "split": [6, 4, 2]}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[1]["split"] = [6, 4]
    with pytest.raises(ValueError, match=r"split is \[6, 4\], but parameter 0 of group 1"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(4, 4))
    optimizer.param_groups[1]["split"] = [6, 6]
    optimizer.step()
    assert not torch.equal(params[0], torch.ones(4, 4))
