"""``target_modules`` chooses the matrices that GaLore-AdamW projects."""

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import rules
from ds_ext.engine.parameters import unpartitioned_shape
from ds_ext.optimizer import param_groups
from ds_ext.optimizer.model_view import ModelView


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"q_proj": nn.Linear(4, 4), "mlp": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
            )
            for _ in range(11)
        )
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.score = nn.Linear(4, 2)


def grouped(module, params, targets="all-linear", **view):
    """Groups as GaLore's target_modules make them."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    entry = rules.REGISTRY["galoreadamw"]
    return param_groups.role_groups(entry, ModelView(module, **view), groups, targets)


def projected(module, groups):
    """Names of the parameters whose group keeps its rank."""
    names = {p: name for name, p in module.named_parameters()}
    return {names[p] for g in groups if g.get("rank", 1) is not None for p in g["params"]}


LAYERS = range(11)
ALL = {f"layers.{i}.{name}.weight" for i in LAYERS for name in ("q_proj", "mlp")}


@pytest.mark.parametrize(
    "targets, expected",
    [
        ("all-linear", ALL | {"score.weight"}),
        (["q_proj"], {f"layers.{i}.q_proj.weight" for i in LAYERS}),
        (["q_proj", "score"], {f"layers.{i}.q_proj.weight" for i in LAYERS} | {"score.weight"}),
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
    given = param_groups.decay_groups(ModelView(module), list(module.parameters()), 0.1)
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


def test_target_modules_that_match_nothing_are_refused():
    module = Net()
    params = list(module.parameters())
    for targets in (["q_prj"], "norm", ["q_proj", "valu"]):
        with pytest.raises(ValueError, match=r"target_modules: '.*' matches no trained matrix"):
            grouped(module, params, targets)
    with pytest.raises(ValueError, match=r"target_modules.*not a regular expression"):
        grouped(module, params, ["q_proj("])
    for targets in (3, [], ""):
        with pytest.raises(ValueError, match=r"target_modules is .*; allowed"):
            grouped(module, params, targets)
    with pytest.raises(ValueError, match=r"target_modules is \"all-linear\", but no"):
        grouped(module, [module.embed.weight])
