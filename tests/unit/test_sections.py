"""Fused matrices: each section is stepped as a matrix of its own, on any number of ranks."""

import copy
import re

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.checkpoint import checks, resharding
from ds_ext.checkpoint.pieces import Pieces
from ds_ext.checkpoint.resharding import OwnedRun
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Box, Shard, TensorParallelSplit
from ds_ext.optimizer import OPTIMIZERS, param_checks
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY
from tests.common import low_rank, table
from tests.common.hypers import SIMULATED
from tests.common.simulated import EXACT, begin_alone, errors

STEPS = 5
SHAPE = (12, 8)
# The keys, and how torch cuts a matrix [12, 8] into its sections (written without ds_ext).
FORMS = {
    "qkv": ({"split": [6, 4, 2]}, lambda x: x.split([6, 4, 2])),
    "gate and up": ({"split": [6, 6]}, lambda x: x.split(6)),
    "heads": ({"heads": 4}, lambda x: x.split(3)),
    "columns": ({"split": [3, 1, 4], "split_dim": 1}, lambda x: x.split([3, 1, 4], 1)),
    "heads of columns": ({"heads": 2, "split_dim": 1}, lambda x: x.split(4, 1)),
    "q, k, v of each head": (
        {"split": [2, 1, 1], "heads": 3},
        lambda x: [y.reshape(-1, 8) for y in x.view(3, 4, 8).split([2, 1, 1], 1)],
    ),
    "the same in columns": (
        {"split": [1, 3], "heads": 2, "split_dim": 1},
        lambda x: [y.reshape(12, -1) for y in x.view(12, 2, 4).split([1, 3], 2)],
    ),
}
RULES = [name for name, entry in REGISTRY.items() if entry.has_sections]


class Ranks:
    """A parameter cut over simulated ranks, each with an optimizer of its run."""

    def __init__(self, name, value, world, hypers, stacked=False):
        self.key, self.shape = nn.Parameter(torch.empty(0, dtype=value.dtype)), tuple(value.shape)
        self.shards = [Shard.of_rank(self.shape, r, world) for r in range(world)]
        self.runs = self.cut(value)
        self.optimizers = [OPTIMIZERS[name]([self.key], **hypers) for _ in range(world)]
        for optimizer in self.optimizers:
            optimizer.stacks = {self.key: 0} if stacked else {}

    def cut(self, x):
        return [x.reshape(-1)[s.start : s.stop].clone() for s in self.shards]

    @torch.no_grad()
    def step(self, grad):
        each = zip(self.optimizers, self.runs, self.cut(grad), self.shards, strict=True)
        return lockstep.simulate([begin_alone(o, RunUpdate(self.key, *u)) for o, *u in each])

    @property
    def whole(self):
        return torch.cat(self.runs).view(self.shape)

    @property
    def owned(self):
        each = enumerate(zip(self.runs, self.shards, strict=True))
        return [{self.key: OwnedRun("p", *own, i, len(self.runs))} for i, own in each]


def apart(make, sections, before, steps):
    """What ``make``'s optimizer of separate parameters makes of the sections of a matrix."""
    params = [[nn.Parameter(x.clone()) for x in sections(p)] for p in before]
    optimizer = make([x for some in params for x in some])
    for grads in steps:
        for some, g in zip(params, grads, strict=True):
            for x, own in zip(some, sections(g), strict=True):
                x.grad = own.clone()
        optimizer.step()
    return [x.detach() for some in params for x in some]


def data(shape=SHAPE, dtype=torch.float64):
    (before,), steps = table.weights([shape], dtype), table.gradients(STEPS, [shape], dtype)
    return before, [g for (g,) in steps]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_every_rule_steps_a_section_as_a_parameter(name, form):
    keys, sections = FORMS[form]
    before, steps = data()
    expected = apart(
        lambda some: OPTIMIZERS[name](some, **SIMULATED[name]),
        sections,
        [before],
        [[g] for g in steps],
    )
    for world in (1, 2, 3, 7):
        ranks = stepped(Ranks(name, before, world, SIMULATED[name] | keys), steps)
        assert max(errors(sections(ranks.whole), expected, sections(before))) <= EXACT


def stepped(ranks, steps):
    for g in steps:
        ranks.step(g)
    return ranks


@pytest.mark.parametrize("form", FORMS)
def test_a_stack_of_experts_has_the_sections_in_each_expert(form):
    keys, sections = FORMS[form]
    before, steps = data((3, *SHAPE))
    hypers = {"lr": 0.02, "weight_decay": 0.1}
    with low_rank.in_dtype(torch.float64):
        expected = apart(
            lambda some: torch.optim.Muon(some, **hypers), sections, list(before), map(list, steps)
        )
    for world in (1, 2, 7):
        ranks = stepped(Ranks("muon", before, world, hypers | keys, stacked=True), steps)
        got, old = ([x for p in whole for x in sections(p)] for whole in (ranks.whole, before))
        assert max(errors(got, expected, old)) <= EXACT


@pytest.mark.parametrize("weight_update", ["stochastic", "nearest", "master", "master24"])
@pytest.mark.parametrize("form", ["qkv", "columns", "q, k, v of each head"])
def test_16_bit_weights_have_the_same_bits_on_any_number_of_ranks(form, weight_update):
    """SCALE's update by rows of few elements is exact: gradients are small whole numbers."""
    keys, sections = FORMS[form]
    before, steps = data(dtype=torch.float32)
    before, steps = before.bfloat16(), [(g % 5).round().bfloat16() for g in steps]
    hypers = {"lr": 2**-9, "momentum": 0.5, "weight_update": weight_update}
    seen = [stepped(Ranks("scale", before, world, hypers | keys), steps) for world in (1, 2, 3, 7)]
    for ranks in seen[1:]:
        assert errors([ranks.whole], [seen[0].whole], [before])[0] <= 1e-2
        same = (ranks.whole == seen[0].whole).float().mean()
        assert same >= 0.99  # sums of a row's squares differ in their last bits
    in_fp32 = stepped(Ranks("scale", before.float(), 2, hypers | keys), [g.float() for g in steps])
    close = {"master": 0.02, "master24": 0.02}.get(weight_update, 0.5)
    new = seen[0].optimizers[0].weights(seen[0].key, seen[0].runs[0], seen[0].shards[0])
    assert errors([new.view(SHAPE)], [in_fp32.whole], [before.float()])[0] <= close


def test_random_bits_of_sections_are_drawn_once_per_element():
    """Columns get the bits of other elements than rows do, but no element's bits twice."""
    keys = []
    for form in ("qkv", "columns", "q, k, v of each head", "heads of columns"):
        p = torch.ones(12 * 8, dtype=torch.bfloat16).view(SHAPE)
        hypers = {"lr": 1.0, "alpha": 2**-9, "iterations": 1, "weight_update": "stochastic"}
        ranks = stepped(Ranks("sinkgd", p, 1, hypers | FORMS[form][0]), [torch.ones_like(p)])
        keys.append(ranks.whole)
    # 1 - 2^-9 is a quarter between 1 - 2^-8 and 1... rounded up by as many random bits everywhere
    ups = [int((k == 1).sum()) for k in keys]
    assert len({*ups}) == 1 and 0 < ups[0] < 12 * 8


@pytest.mark.parametrize("form", ["qkv", "columns"])
def test_a_checkpoint_does_not_depend_on_sections_or_ranks(form):
    keys, _ = FORMS[form]
    before, steps = data()
    hypers = {"lr": 0.02, "weight_decay": 0.1} | keys
    straight = stepped(Ranks("muon", before, 2, hypers), steps)
    first = stepped(Ranks("muon", before, 3, hypers), steps[:2])
    saved = [resharding.save(o, own) for o, own in zip(first.optimizers, first.owned, strict=True)]
    assert [*saved[0]["state"]["p"]] == ["step", "m"]
    again = Ranks("muon", torch.zeros_like(before), 2, {"lr": 0.1} | keys)
    for optimizer, own in zip(again.optimizers, again.owned, strict=True):
        pieces = Pieces(copy.deepcopy(saved))
        checks.check(pieces, optimizer, own, True)
        resharding.load_state(pieces, optimizer, own)
        resharding.load_weights(pieces, optimizer, own)
    stepped(again, steps[2:])
    assert errors([again.whole], [straight.whole], [before])[0] <= EXACT


def test_measured_updates_are_those_of_the_whole_matrix():
    before, steps = data()
    for form in ("qkv", "columns"):
        ranks = Ranks("muon", before, 2, {"lr": 0.02} | FORMS[form][0])
        for optimizer in ranks.optimizers:
            optimizer.measure_updates()
        ranks.step(steps[0])
        sums = sum(optimizer.update_stats.sums() for optimizer in ranks.optimizers)[0]
        expected = (ranks.whole - before).square().sum(), ranks.whole.square().sum(), 96.0
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


class Given(nn.Module):
    """A matrix whose gradient is what it is called with."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value.clone())

    def forward(self, gradient):
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("form", ["qkv", "columns"])
@pytest.mark.parametrize("way", ["plain", "fused"])
def test_a_step_of_fp32_weights_splits_them(name, form, way):
    """SinkGD's and SCALE's whole matrices are stepped in batches, and checked by their sums."""
    keys, sections = FORMS[form]
    before, steps = data(dtype=torch.float32)
    hypers = SIMULATED[name] | ({"momentum": 0.0} if name == "scale" else {})
    expected = apart(
        lambda some: OPTIMIZERS[name](some, **hypers), sections, [before], [[g] for g in steps]
    )
    model = Given(before)
    optimizer = OPTIMIZERS[name](model.parameters(), **hypers | keys)
    if way == "fused":
        ds_ext.fuse_into_backward(model, optimizer)
    for g in [*steps[:2], torch.full_like(before, torch.nan), *steps[2:]]:
        if way == "fused" or g.isfinite().all():
            model(g).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert max(errors(sections(model.weight), expected, sections(before))) <= 1e-5


# What a config says wrong: the entry, and the message.
WRONG = {
    "sizes": (
        {"match": "qkv_proj", "split": [6, 4]},
        "param_groups[0].split is [6, 4], but qkv_proj.weight has the shape [12, 8]: the sizes "
        "must add up to its 12 rows, but add up to 10.",
    ),
    "columns": (
        {"match": "qkv_proj", "split": [4, 4]},
        'add up to 8 (for its columns, set "split_dim").',
    ),
    "sizes of heads": (
        {"match": "qkv_proj", "split": [2, 2, 1], "heads": 3},
        "its 12 rows, but add up to 5 x 3 heads.",
    ),
    "heads": (
        {"match": "o_proj", "heads": 3},
        "param_groups[0].heads is 3, but o_proj.weight has the shape [8, 8]: heads must divide "
        "its 8 rows.",
    ),
    "dim alone": (
        {"match": "o_proj", "split_dim": 1},
        "param_groups[0].split_dim is 1, but o_proj.weight has the shape [8, 8]: set",
    ),
    "type": ({"match": "o_proj", "split": [4.5, 3.5]}, "allowed: a list of whole numbers > 0"),
    "none": ({"match": "o_proj", "split": []}, "allowed: a list of whole numbers > 0"),
    "auto": (
        {"match": "qkv_proj", "split": "auto"},
        "param_groups[0].split is 'auto'; allowed: a list of whole numbers > 0 or null. \"auto\" "
        "was removed in ds_ext 1.1: list the rows of each part",
    ),
    "no matrix": ({"match": "norm", "split": [4, 4]}, "param_groups[0]: 'norm' matches no matrix"),
    "not Muon's": ({"match": "o_proj", "type": "AdamW", "heads": 2}, "unknown key"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_sizes_are_refused_by_name(kind):
    entry, message = WRONG[kind]
    with pytest.raises(ValueError, match=re.escape(message)):
        rules_of(Attention(), param_groups=[entry])


@pytest.mark.parametrize(
    "kind, hypers",
    [("Muon", {"nbits": 8}), ("Muon", {"beta2": 0.9}), ("SinkGD", {"spectral": "unit"})],
)
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
