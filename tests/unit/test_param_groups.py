"""Param groups of a model: weight decay, entries by name, and matrices that a rule is for.

The roles of parameters in SCALE and SinkGD: test_param_groups.py of tests/distributed.
"""

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import ops
from ds_ext.engine.parameters import unpartitioned_shape
from ds_ext.optimizer import param_groups
from ds_ext.optimizer.model_view import model_view, summary
from ds_ext.rules import REGISTRY
from tests.common.own_rule import registered


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        parts = {"q_proj": (nn.Linear, 6, 6), "mlp": (nn.Linear, 6, 6), "norm": (nn.LayerNorm, 6)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: kind(*sizes) for name, (kind, *sizes) in parts.items()})
            for _ in range(11)
        )
        self.lm_head = nn.Linear(6, 10, bias=False)
        self.score = nn.Linear(6, 2)


def by_name(model, groups):
    """The group of each parameter."""
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: group for group in groups for p in group["params"]}


MIXED = [
    {"match": "embed|lm_head", "type": "GaLoreAdamW", "rank": None, "lr": 3e-3},
    {"match": r"norm|bias$", "type": "ds_ext.lomo"},
]


def test_groups_have_the_keys_of_their_own_rule():
    optimizer = ds_ext.AdaLomo.for_model(
        Net(), lr=0.02, weight_decay=0.1, seed=3, param_groups=MIXED
    )
    by_kind = {}
    for group in optimizer.param_groups:
        by_kind.setdefault(group.get("type"), []).append(group)
    for lomo in by_kind["LOMO"]:
        assert lomo["lr"] == 0.02 and lomo["seed"] == 3  # the optimizer's
        assert "clip_threshold" not in lomo and "betas" not in lomo
        assert lomo["weight_decay"] == 0.0  # norms and biases
    for galore in by_kind["GaLoreAdamW"]:
        assert galore["lr"] == 3e-3 and galore["rank"] is None and galore["weight_decay"] == 0.1
    assert {g["weight_decay"] for g in by_kind[None]} == {0.1}


ENTRIES = [
    ([], r"param_groups is \[\]; allowed: a list of"),
    ({"match": "norm"}, r"param_groups is .*; allowed: a list of"),
    ([{"match": "norm"}], r"param_groups\[0\] has only a \"match\".*; allowed"),
    ([{"type": "LOMO"}], r"param_groups\[0\] is .*; allowed"),
    ([{"match": "norm", "type": "LOMOO"}], r"param_groups\[0\].type is 'LOMOO'.*mean \"LOMO\""),
    ([{"match": "norm", "lr": -1}], r"param_groups\[0\].lr is -1; allowed: a number >= 0"),
    ([{"match": "norm", "type": "LOMO", "betas": 1}], r"unknown key .*param_groups\[0\].betas"),
    ([{"match": "nrom", "lr": 1.0}], r"param_groups\[0\].match: 'nrom'.*mean \"norm\""),
    (
        [{"match": "n(", "lr": 1.0}],
        r"param_groups\[0\].match: 'n\(' is not a regular expression: missing \)",
    ),
    (
        [{"match": "norm", "lr": 1.0}, {"match": "norm.bias", "lr": 1.0}],
        r"param_groups\[1\].match: 'norm.bias' matches layers.*, as does param_groups\[0\]",
    ),
]
ILL = [(ds_ext.AdaLomo, {"param_groups": entries}, message) for entries, message in ENTRIES]
ILL += [(ds_ext.GaLoreAdamW, {"others": 3}, "others is 3; allowed")]
ILL += [(ds_ext.GaLoreAdamW, {"others": {"rnk": None}}, "unknown key others.rnk")]
ILL += [(ds_ext.GaLoreAdamW, {"others": {"type": "Lomoo"}}, "others.type is 'Lomoo'")]
ILL += [(ds_ext.AdaLomo, {"others": {"lr": 1.0}}, "unknown key others")]  # a rule for all shapes
MUON = {"type": "Muon", "lr": 1e-3}
ILL += [
    (
        ds_ext.AdaLomo,
        {"param_groups": [{"match": "norm"} | MUON]},
        r"Muon steps only matrices, and layers\.0\.norm\.weight, which 'norm' gives to it, has the "
        r'shape \[6\]: give it "type": "AdamW"',
    ),
    (ds_ext.Muon, {"others": MUON}, "'others' gives to it, has the shape"),
]
TARGETS = [
    (name, "'.*' matches no trained matrix") for name in (["q_prj"], "norm", ["q_proj", "v"])
]
TARGETS += [(["q_proj("], ".*not a regular expression")]
TARGETS += [(name, "is .*; allowed") for name in (3, [], "")]
ILL += [
    (ds_ext.GaLoreAdamW, {"target_modules": name}, f"target_modules:? ?{words}")
    for name, words in TARGETS
]


@pytest.mark.parametrize("kind, keys, message", ILL)
def test_ill_entries_and_others_are_refused(kind, keys, message):
    with pytest.raises(ValueError, match=message):
        kind.for_model(Net(), **keys)


def test_what_a_rule_is_not_for_is_given_to_others():
    model = Net()
    optimizer = ds_ext.GaLoreAdamW.for_model(model, rank=2, others={"lr": 1e-4})
    own, others = optimizer.param_groups
    assert {*by_name(model, [own])} == ALL | {"score.weight"}
    assert (own["rank"], own["lr"]) == (2, 1e-3)
    assert (others["rank"], others["lr"]) == (None, 1e-4)
    mixed = ds_ext.GaLoreAdamW.for_model(model, others={"type": "LOMO", "lr": 0.1})
    assert [g.get("type") for g in mixed.param_groups] == [None, "LOMO"]


def test_entries_without_a_type_leave_the_choice_to_the_rule():
    model = Net()
    entries = [{"match": "lm_head|layers.0", "lr": 1e-4}]
    optimizer = ds_ext.GaLoreAdamW.for_model(model, rank=2, param_groups=entries)
    found = by_name(model, optimizer.param_groups)
    found = {name: (group["rank"], group["lr"]) for name, group in found.items()}
    assert found["lm_head.weight"] == (None, 1e-4) and found["embed.weight"] == (None, 1e-3)
    assert found["layers.0.mlp.weight"] == (2, 1e-4) and found["layers.1.mlp.weight"] == (2, 1e-3)


def test_vectors_of_a_rule_for_matrices_are_refused():
    model = Net()
    weight = model.layers[0]["mlp"].weight.detach().clone()
    message = r"Muon supports only matrices, but {} has the shape \[6\].*Muon.for_model\("
    with pytest.raises(ValueError, match=message.format(r"layers\.0\.q_proj\.bias")):
        ds_ext.fuse_into_backward(model, ds_ext.Muon(model.parameters()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=message.format("parameter 2 of group 0.*")):
        ds_ext.Muon(model.parameters()).step()
    assert torch.equal(weight, model.layers[0]["mlp"].weight)


def test_the_head_is_a_head_where_it_is_tied():
    model = Net()
    model.lm_head.weight = model.embed.weight
    assert model_view(model)[model.embed.weight].role == "head"


def test_groups_of_a_script_are_split_further():
    model = Net()
    given = [
        {"params": list(model.layers.parameters()), "lr": 0.5},
        {"params": [*model.embed.parameters(), *model.score.parameters()]},
    ]
    config = {"param_groups": [{"match": "bias|norm", "type": "LOMO"}]}
    made = param_groups.of_config(REGISTRY["adalomo"], config, model_view(model), given)
    shown = [(g.get("type"), g.get("lr"), len(g["params"])) for g in made.groups]
    assert shown == [(None, 0.5, 22), ("LOMO", 0.5, 44), (None, None, 2), ("LOMO", None, 1)]


def test_a_rule_without_weight_decay_has_groups_of_a_model():
    model = nn.Linear(5, 7)
    before = model.weight.detach().clone()
    with registered(lambda self, p, g, s, t, shard: ops.apply_(p, g, shard, lr=self.lr)):
        optimizer = ds_ext.Own.for_model(model, lr=0.5)
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before - 0.5)
        with pytest.raises(ValueError, match="weight_decay"):
            ds_ext.Own.for_model(model, weight_decay=0.1)


def test_a_model_that_zero_3_has_cut_is_refused():
    model = nn.Linear(3, 4)
    model.weight.data = torch.empty(0)  # as zero.Init leaves it
    with pytest.raises(ValueError, match="config of deepspeed.initialize, or make it before"):
        ds_ext.AdaLomo.for_model(model)


def grouped(module, params, targets="all-linear", **view):
    """Groups as GaLore's target_modules make them."""
    entry, given = REGISTRY["galoreadamw"], {"target_modules": targets}
    return param_groups.of_config(entry, given, model_view(module, **view), params).groups


def projected(module, groups):
    """Names of the parameters whose group keeps its rank."""
    return {n for n, g in by_name(module, groups).items() if g.get("rank", 1) is not None}


ALL = {f"layers.{i}.{name}.weight" for i in range(11) for name in ("q_proj", "mlp")}


@pytest.mark.parametrize(
    "targets, expected",
    [
        ("all-linear", ALL | {"score.weight"}),
        (["q_proj"], {f"layers.{i}.q_proj.weight" for i in range(11)}),
        (["q_proj", "score"], {f"layers.{i}.q_proj.weight" for i in range(11)} | {"score.weight"}),
        ([r"layers\.1\.mlp"], {"layers.1.mlp.weight"}),
        ([r".*\.\d\d\.mlp"], {"layers.10.mlp.weight"}),
        ("embed", {"embed.weight"}),
        (["lm_head"], {"lm_head.weight"}),
    ],
)
def test_target_modules(targets, expected):
    module = Net()
    params = list(module.parameters())
    groups = grouped(module, params, targets)
    assert projected(module, groups) == expected
    assert [p for p in params if any(p is q for g in groups for q in g["params"])] == params
    assert sum(len(g["params"]) for g in groups) == len(params)
    ds_ext.GaLoreAdamW(groups, rank=2)


def test_target_modules_split_the_groups_of_weight_decay():
    module = Net()
    given = param_groups.decay_groups(model_view(module), list(module.parameters()), 0.1)
    groups = grouped(module, given, ["q_proj"])
    assert [(g["weight_decay"], "rank" in g, len(g["params"])) for g in groups] == [
        (0.1, False, 11),
        (0.1, True, 14),
        (0.0, True, 45),
    ]
    assert all(g.get("rank") is None for g in groups)


def test_tied_and_partitioned_weights():
    module = Net()
    module.lm_head.weight = module.embed.weight
    groups = grouped(module, list(module.parameters()))
    assert projected(module, groups) == ALL | {"score.weight"}
    for p in module.parameters():  # as under ZeRO-3
        p.ds_shape = p.shape
        p.data = torch.empty(0)
    params = list(module.parameters())
    groups = grouped(module, params, shape=unpartitioned_shape)
    assert projected(module, groups) == ALL | {"score.weight"}
    with pytest.raises(ValueError, match=r"target_modules is \"all-linear\", but no"):
        grouped(module, [module.embed.weight])


class RMSNorm(nn.Module):
    """A norm of HF's kind, with a weight of two dimensions to tell type from shape."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        parts = ("proj", nn.Linear, (3, 3)), ("ln", nn.LayerNorm, (3,)), ("rms", RMSNorm, ())
        parts += (("conv", nn.Conv1d, (3, 3, 2)),)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: kind(*sizes) for name, kind, sizes in parts}) for _ in range(12)
        )
        self.attention = nn.MultiheadAttention(3, 1)
        self.experts = nn.Parameter(torch.zeros(2, 3, 3))
        self.table_bias = nn.Parameter(torch.zeros(4, 4))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


DECAYED = {"embed.weight", "layers.*.proj.weight", "layers.*.conv.weight"}
DECAYED |= {"attention.in_proj_weight", "attention.out_proj.weight", "experts"}


def test_decay_groups_spare_norms_biases_and_vectors():
    model = Mixed()
    params = list(model.parameters())
    decayed, spared = param_groups.decay_groups(model_view(model), params, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    got = summary(by_name(model, [decayed]))
    assert {entry.split(" ")[0] for entry in got.split(", ")} == DECAYED
    assert len(decayed["params"]) == 4 + 2 * 12  # the tied weight once
    # together all of them, once each, in the order given
    ids = {id(p): i for i, p in enumerate(params)}
    orders = [[ids[id(p)] for p in group["params"]] for group in (decayed, spared)]
    assert sorted(orders[0] + orders[1]) == list(range(len(params)))
    assert all(order == sorted(order) for order in orders)


def test_decay_groups_keep_to_the_parameters_given():
    model, stranger = nn.Linear(3, 2), nn.Parameter(torch.zeros(2, 2))
    decayed, spared = param_groups.decay_groups(model_view(model), [stranger, model.weight], 0.1)
    assert [p is model.weight for p in decayed["params"]] == [True]
    assert [p is stranger for p in spared["params"]] == [True]  # of unknown kind


def test_summary_leaves_layer_numbers_out():
    names = [f"model.layers.{i}.mlp.{j}.weight" for i in range(12) for j in range(2)]
    expected = "model.layers.*.mlp.*.weight (24), head.weight, norm2.bias"
    assert summary([*names, "head.weight", "norm2.bias"]) == expected
    assert summary([]) == "none"
    assert summary(iter(["a.0.b", "a.1.b"])) == "a.*.b (2)"
