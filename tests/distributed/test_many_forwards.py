"""Steps and schedules where a loss uses several forward passes of the engine are DeepSpeed's.

test_scenarios.py compares the weights of such steps, and of forward passes ahead, with torch's.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests import worlds
from tests.common import engines

WARMUP = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
SCHEDULER = {"type": "WarmupLR", "params": WARMUP | {"warmup_type": "linear"}}


def train(stage: int, policy: str, accumulation: int) -> list[tuple[Any, ...]]:
    """Trains by our LOMO; or by SGD of torch in DeepSpeed's own optimizer if ``policy`` is "".

    Returns whether each micro-batch ends a step, the rate, and DeepSpeed's counts after it.
    """
    torch.manual_seed(0)
    model, told = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), []
    kind = ds_ext.LOMO if policy else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.5)
    more = {"gradient_accumulation_steps": accumulation, "scheduler": SCHEDULER}
    engine = engines.start(model, optimizer, stage, policy, **more)
    for number in range(3 * accumulation):
        x = engines.rows(number, dist.get_rank(), 4, 5)
        engine.backward((engine(x[:2]) - engine(x[2:])).square().sum() + engine(x[1:3]).sum())
        is_boundary, lr = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0]
        engine.step()
        told.append((is_boundary, lr, engine.micro_steps, engine.global_steps))
    return told


@pytest.mark.parametrize("stage, accumulation", [(0, 2), (1, 2), (2, 4), (3, 2)])
def test_steps_and_schedules_are_deepspeeds(stage, accumulation):
    ours, theirs = (worlds.run(2, train, stage, how, accumulation)[0] for how in ("sharded", ""))
    assert ours == theirs and len({lr for _, lr, _, _ in ours}) > 1
