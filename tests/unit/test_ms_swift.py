"""ms-swift's plugin, imported by its path as ms-swift does, beside a stand-in for ms-swift."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
from torch import nn

import ds_ext
from ds_ext.optimizer import OPTIMIZERS


@pytest.fixture
def plugin(monkeypatch):
    class OptimizerCallback:
        def __init__(self, args, trainer):
            self.args, self.trainer = args, trainer

    optimizers = types.ModuleType("swift.optimizers")
    optimizers.OptimizerCallback, optimizers.optimizers_map = OptimizerCallback, {}
    monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.optimizers", optimizers)
    path = Path(ds_ext.__path__[0]) / "ms_swift.py"
    spec = importlib.util.spec_from_file_location("_swift_external_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return types.SimpleNamespace(module=module, map=optimizers.optimizers_map)


def make(plugin, name, **told):
    args = {"optimizer": name, "learning_rate": 0.02, "weight_decay": 0.1, "optim_args": None}
    args = types.SimpleNamespace(**args, deepspeed=None)
    vars(args).update(told)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    return plugin.map[name](args, types.SimpleNamespace(model=model)).create_optimizer()


@pytest.mark.parametrize("deepspeed", [None, {"zero_optimization": {"stage": 2}}])
def test_every_optimizer_is_made_with_the_groups_of_a_config(deepspeed, plugin):
    assert plugin.map.keys() == OPTIMIZERS.keys()
    for name, kind in OPTIMIZERS.items():
        optimizer = make(plugin, name, deepspeed=deepspeed)
        assert type(optimizer) is kind and optimizer.defaults["lr"] == 0.02
        decayed = [p.ndim for g in optimizer.param_groups for p in g["params"] if g["weight_decay"]]
        assert decayed == [2]  # neither biases nor the norm


def test_optim_args_are_hyper_parameters(plugin):
    optimizer = make(plugin, "galoreadamw", optim_args="rank=4, scale=0.5,proj_type=reverse_std")
    group = optimizer.param_groups[0]
    assert (group["rank"], group["scale"], group["proj_type"]) == (4, 0.5, "reverse_std")
    with pytest.raises(ValueError, match="'rank' is not key=value"):
        make(plugin, "galoreadamw", optim_args="rank")
    with pytest.raises(ValueError, match="rnk"):
        make(plugin, "galoreadamw", optim_args="rnk=4")
