"""docs/guides/recipes.md: two ranks train with each of its configs."""

import contextlib
import json
import re
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import worlds

STEPS = 3


def train(config: dict[str, Any], calls: str) -> list[float]:
    """The losses of some steps on one batch, with the section's ``calls`` between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, 16, generator=generator).bfloat16()
    losses = []
    for _ in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = (engine(x).float() - x).square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
        if "offload_states" in calls:
            engine.offload_states()
            engine.reload_states()
    with engine.optimizer.ema() if "ema()" in calls else contextlib.nullcontext():
        losses.append(float((engine(x).float() - x).square().mean()))
    return losses


PAGE = worlds.ROOT / "docs/guides/recipes.md"
SECTIONS = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text()))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_config_trains(section):
    (config,) = re.findall(r"(?ms)^```json\n(.*?)^```$", SECTIONS[section])
    calls = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", SECTIONS[section]))
    for losses in worlds.run(2, train, json.loads(config), calls):
        assert all(a != b for a, b in zip(losses, losses[1:], strict=False)), losses
        assert losses[2] < losses[0]
