"""Several rules in one model: entries by name, and what a rule is not for."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.optimizer import param_groups
from ds_ext.optimizer.model_view import ModelView
from ds_ext.rules import REGISTRY


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 10, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.lm_head(self.norm(x))


def loss_of(model, step):
    made = torch.Generator().manual_seed(step)
    x, y = torch.randint(10, (2, 7, 5), generator=made)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


MIXED = [
    {"match": "embed|lm_head", "type": "GaLoreAdamW", "rank": None, "lr": 3e-3},
    {"match": r"norm|bias$", "type": "LOMO", "lr": 0.1},
]


def test_groups_have_the_keys_of_their_own_rule():
    optimizer = ds_ext.AdaLomo.for_model(
        Net(), lr=0.02, weight_decay=0.1, seed=3, param_groups=MIXED
    )
    by_kind = {}
    for group in optimizer.param_groups:
        by_kind.setdefault(group.get("type"), []).append(group)
    for lomo in by_kind["LOMO"]:
        assert lomo["lr"] == 0.1 and lomo["seed"] == 3
        assert "clip_threshold" not in lomo and "betas" not in lomo
        assert lomo["weight_decay"] == 0.0  # norms and biases
    for galore in by_kind["GaLoreAdamW"]:
        assert galore["lr"] == 3e-3 and galore["rank"] is None and galore["weight_decay"] == 0.1
    assert {g["weight_decay"] for g in by_kind[None]} == {0.1}


def test_what_other_rules_share_comes_from_the_optimizer():
    optimizer = ds_ext.AdaLomo.for_model(
        Net(), lr=0.02, param_groups=[{"match": "norm", "type": "ds_ext.lomo"}]
    )
    lomo = optimizer.param_groups[1]
    assert (lomo["type"], lomo["lr"]) == ("LOMO", 0.02)


def test_a_state_of_mixed_rules_is_restored():
    torch.manual_seed(0)
    models = [Net(), Net()]
    optimizers = [ds_ext.AdaLomo.for_model(m, lr=0.02, param_groups=MIXED) for m in models]
    for step in range(2):
        loss_of(models[0], step).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, 2).backward()
        optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


ILL = [
    ([], r"param_groups is \[\]; allowed: a list of"),
    ({"match": "norm"}, r"param_groups is .*; allowed: a list of"),
    ([{"match": "norm"}], r"param_groups\[0\] is .*; allowed"),
    ([{"type": "LOMO"}], r"param_groups\[0\] is .*; allowed"),
    ([{"match": "norm", "type": "LOMOO"}], r"param_groups\[0\].type is 'LOMOO'.*mean \"LOMO\""),
    ([{"match": "norm", "lr": -1}], r"param_groups\[0\].lr is -1; allowed: a number >= 0"),
    ([{"match": "norm", "type": "LOMO", "betas": 1}], r"unknown key .*param_groups\[0\].betas"),
    ([{"match": "nrom", "lr": 1.0}], r"param_groups\[0\].match: 'nrom'.*mean \"norm\""),
    ([{"match": "n(", "lr": 1.0}], r"param_groups\[0\].match: 'n\(' is not a regular"),
    (
        [{"match": "norm", "lr": 1.0}, {"match": "norm.bias", "lr": 1.0}],
        r"param_groups\[1\].match: 'norm.bias' matches norm.bias, as does param_groups\[0\]",
    ),
]


@pytest.mark.parametrize("entries, message", ILL)
def test_ill_entries_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        ds_ext.AdaLomo.for_model(Net(), param_groups=entries)


def test_what_a_rule_is_not_for_is_given_to_others():
    model = Net()
    optimizer = ds_ext.GaLoreAdamW.for_model(model, rank=2, others={"lr": 1e-4})
    names = {p: n for n, p in model.named_parameters()}
    own, others = optimizer.param_groups
    assert {names[p] for p in own["params"]} == {f"layers.{i}.weight" for i in range(3)}
    assert (own["rank"], own["lr"]) == (2, 1e-3)
    assert (others["rank"], others["lr"]) == (None, 1e-4)
    mixed = ds_ext.GaLoreAdamW.for_model(model, others={"type": "LOMO", "lr": 0.1})
    assert [g.get("type") for g in mixed.param_groups] == [None, "LOMO"]


def test_entries_without_a_type_leave_the_choice_to_the_rule():
    model = Net()
    entries = [{"match": "lm_head|layers.0", "lr": 1e-4}]
    optimizer = ds_ext.GaLoreAdamW.for_model(model, rank=2, param_groups=entries)
    names = {p: n for n, p in model.named_parameters()}
    found = {names[p]: (g["rank"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    assert found["lm_head.weight"] == (None, 1e-4) and found["embed.weight"] == (None, 1e-3)
    assert found["layers.0.weight"] == (2, 1e-4) and found["layers.1.weight"] == (2, 1e-3)


@pytest.mark.parametrize(
    "others, message",
    [
        (3, r"others is 3; allowed"),
        ({"rnk": None}, r"unknown key others.rnk"),
        ({"type": "Lomoo"}, r"others.type is 'Lomoo'"),
    ],
)
def test_ill_others_are_refused(others, message):
    with pytest.raises(ValueError, match=message):
        ds_ext.GaLoreAdamW.for_model(Net(), others=others)


def test_rules_for_all_parameters_have_no_others():
    with pytest.raises(ValueError, match="unknown key others"):
        ds_ext.AdaLomo.for_model(Net(), others={"lr": 1.0})


@pytest.fixture
def matrices_only(monkeypatch):
    """A rule that is for matrices of linear layers, as if it were registered so."""
    entry = REGISTRY["lomo"]
    roles = {"other": {"type": "AdaLomo"}, "head": {"type": "AdaLomo", "lr": 0.5}}
    roles["embedding"] = roles["other"]
    monkeypatch.setitem(REGISTRY, "lomo", replace(entry, roles=roles, any_shape=False))


def test_roles_choose_the_rule(matrices_only):
    model = Net()
    optimizer = ds_ext.LOMO.for_model(model, lr=0.1)
    names = {p: n for n, p in model.named_parameters()}
    found = {
        names[p]: (g.get("type"), g["lr"]) for g in optimizer.param_groups for p in g["params"]
    }
    assert found["layers.1.weight"] == (None, 0.1)
    assert found["lm_head.weight"] == ("AdaLomo", 0.5)
    assert found["embed.weight"] == found["norm.bias"] == ("AdaLomo", 0.1)


@pytest.mark.parametrize("kind", ["SCALE", "SinkGD"])
def test_the_papers_roles(kind):
    model = Net()
    optimizer = getattr(ds_ext, kind).for_model(model, lr=0.1)
    names = {p: n for n, p in model.named_parameters()}
    found = {names[p]: g for g in optimizer.param_groups for p in g["params"]}
    other = "FlashAdamW" if kind == "SinkGD" else "AdamW"
    assert "type" not in found["layers.1.weight"] and found["norm.bias"]["type"] == other
    ends = found["embed.weight"], found["lm_head.weight"]
    if kind == "SinkGD":
        assert all(group["type"] == other for group in ends)
        return
    shown = [(g["norm_axis"], g["momentum"]) for g in (*ends, found["layers.1.weight"])]
    assert shown == [("column", 0.0), ("row", 0.9), ("row", 0.0)]


def test_vectors_of_a_rule_for_matrices_are_refused(matrices_only):
    model = Net()
    weight = model.layers[0].weight.detach().clone()
    message = (
        r"LOMO supports only matrices, but a parameter has the shape \[6\].*LOMO.for_model\(model"
    )
    with pytest.raises(ValueError, match=message):
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters()))
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match=message):
        ds_ext.LOMO(model.parameters()).step()
    assert torch.equal(weight, model.layers[0].weight)


def test_the_head_is_a_head_where_it_is_tied():
    model = Net()
    model.lm_head.weight = model.embed.weight
    assert ModelView(model).role(model.embed.weight) == "head"


def test_groups_of_a_script_are_split_further():
    model = Net()
    given = [
        {"params": list(model.layers.parameters()), "lr": 0.5},
        {"params": [*model.embed.parameters(), *model.norm.parameters()]},
    ]
    config = {"param_groups": [{"match": "bias|norm", "type": "LOMO"}]}
    made = param_groups.of_config(REGISTRY["adalomo"], config, ModelView(model), given)
    shown = [(g.get("type"), g.get("lr"), len(g["params"])) for g in made.groups]
    assert shown == [(None, 0.5, 3), ("LOMO", 0.5, 3), (None, None, 1), ("LOMO", None, 2)]


def test_a_model_that_zero_3_has_cut_is_refused():
    model = nn.Linear(3, 4)
    model.weight.data = torch.empty(0)  # as zero.Init leaves it
    with pytest.raises(ValueError, match="config of deepspeed.initialize instead"):
        ds_ext.AdaLomo.for_model(model)
