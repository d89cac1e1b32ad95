"""docs/adding-an-optimizer.md: its code is run, and gives an optimizer like any other."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import ds_ext
from ds_ext import rules
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory

PAGE = next(up for up in Path(__file__).parents if (up / "docs").is_dir()) / (
    "docs/adding-an-optimizer.md"
)
SHAPE, LR, MOMENTUM, DECAY, STEPS = (7, 5), 0.03, 0.6, 0.1, 4


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The module that the page's code is."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(code.splitlines()) < 60
    file = tmp_path_factory.mktemp("page") / "signsgd.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("signsgd", file)
    sys.modules["signsgd"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del rules.REGISTRY["signsgd"], sys.modules["signsgd"]


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SHAPE, dtype=torch.float64) for _ in range(STEPS)]


def expected(p: torch.Tensor) -> torch.Tensor:
    m = torch.zeros_like(p)
    for g in gradients():
        m = MOMENTUM * m + (1 - MOMENTUM) * g
        alpha = LR * p.square().mean().sqrt()
        p = p * (1 - alpha * DECAY) - alpha * m.sign()
    return p


def start() -> torch.Tensor:
    return torch.linspace(-1, 2, 35, dtype=torch.float64).view(SHAPE)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_its_optimizer_is_the_same_on_any_number_of_ranks(page, world):
    rule = page.SignSGD(lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    shards = [Shard.of_rank(SHAPE, rank, world) for rank in range(world)]
    runs = [start().view(-1)[s.start : s.stop].clone() for s in shards]
    states = [zeros(rule.state_spec(s), run) for s, run in zip(shards, runs, strict=True)]
    for t, g in enumerate(gradients(), 1):
        parts = zip(runs, states, shards, strict=True)
        ranks = [[rule.step(p, g.view(-1)[k.start : k.stop], s, t, k)] for p, s, k in parts]
        assert lockstep.simulate(ranks) == 1
    assert torch.allclose(torch.cat(runs), expected(start()).view(-1), rtol=0, atol=1e-12)


def test_its_optimizer_is_found_by_name(page):
    p = torch.nn.Parameter(start())
    optimizer = ds_ext.SignSGD([p], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for g in gradients():
        p.grad = g
        optimizer.step()
    assert torch.allclose(p.detach(), expected(start()), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="momentum is 1.5; allowed: a number in"):
        ds_ext.SignSGD([p], momentum=1.5)


def test_deepspeed_and_the_planner_know_it(page):
    from ds_ext.config import optimizer_names

    assert optimizer_names.concerns_us({"optimizer": {"type": "SignSGD"}})
    rule = OPTIMIZERS["signsgd"].hypers()
    assert memory.optimizer_memory(rule, {"a": SHAPE}, None, 1, torch.float32, 1).state == 4 * 35


def test_another_rule_of_the_same_name_is_refused(page):
    with pytest.raises(ValueError, match="named AdaLomo is registered already"):
        rules.register(paper="", state="", rounds="")(type("AdaLomo", (), {}))
